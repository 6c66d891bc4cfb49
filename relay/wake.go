package relay

import (
	"context"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/pause"
)

// wake lets publishers poll the table before their pause is over.
type wake struct {
	mu sync.Mutex
	ch chan struct{}
}

// next returns a channel that the next call closes.
func (w *wake) next() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ch == nil {
		w.ch = make(chan struct{})
	}
	return w.ch
}

func (w *wake) call() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ch != nil {
		close(w.ch)
		w.ch = nil
	}
}

// Wake makes the relay poll the outbox now, instead of at the end of its pause (PollMax at most).
// It is for programs that publish and relay in one process. Call it after COMMIT. It is safe at any
// time and never blocks. A call that comes too early, or a missing call, only costs the pause.
func (r *Relay) Wake() { r.wake.call() }

// listen wakes the publishers when a program reports, by NOTIFY, that it committed rows. It has a
// connection of its own, and only reduces latency: while the connection is lost, polling finds all
// rows.
func (r *Relay) listen(ctx context.Context) {
	for trouble := 1; ctx.Err() == nil; trouble++ {
		err := r.listenOnce(ctx, &trouble)
		if ctx.Err() != nil {
			return
		}
		wait := backoff(trouble)
		r.say.warn(ctx, "the relay cannot listen for NOTIFY; polling still finds rows", "relay", r.cfg.Name, "error", err, "retry_in", wait)
		pause.For(ctx, wait)
	}
}

func (r *Relay) listenOnce(ctx context.Context, trouble *int) error {
	pooled, err := r.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	conn := pooled.Hijack() // a listening session must not return to the pool
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if _, err := conn.Exec(ctx, "LISTEN "+pgx.Identifier{r.cfg.Schema}.Sanitize()); err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	*trouble = 0
	for {
		r.wake.call() // also at first: earlier notifications are not repeated
		if _, err := conn.WaitForNotification(ctx); err != nil {
			return fmt.Errorf("wait for a notification: %w", err)
		}
	}
}
