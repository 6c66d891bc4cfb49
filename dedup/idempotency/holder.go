package idempotency

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// holder has the lock of a key, until the database's clock passes its end or somebody with another token takes it. The
// token is in every write, so a holder that lost the lock cannot store anything.
type holder struct {
	o   *Operation
	key Key
	at  *stored
	// working ends when the lock is lost, and not with the caller: what must not be cut short is done under it.
	working context.Context           //nolint:containedctx // of the work between keep and its stop
	renewed atomic.Pointer[time.Time] // when the lock was last asked for that it has
	ending  atomic.Bool               // the outcome is about to be stored, and the lock goes with it

	// Of the phase under way:
	uncalled bool      // its call was certainly not made, neither by this holder nor by those before
	since    time.Time // its first call was not made before, where another holder may have made it
	noted    string    // its name, once it is written down that its call is made, which must not be made twice
	called   bool      // its call was made, and the foreign system did what it was asked for
	doubtful bool      // such a call may have been made, and what it found out is not stored
	away     bool      // the connection of its transaction broke
	expired  *string   // its name, once an earlier execution turns out to have done it: no other holder of the token may have
}

// newHolder is of a key whose lock was asked for at a time.
func newHolder(o *Operation, key Key, at *stored, asked time.Time) *holder {
	h := &holder{o: o, key: key, at: at}
	h.renewed.Store(&asked)
	return h
}

// keep renews the lock until stop is called, and makes h.working.
func (h *holder) keep(ctx context.Context) (stop func()) {
	ctx, lose := context.WithCancelCause(context.WithoutCancel(ctx))
	h.working = ctx
	var group sync.WaitGroup
	group.Go(func() {
		asked := *h.renewed.Load()
		for pause(ctx, h.o.cfg.Lock/3-time.Since(asked)) { // from beginning to beginning: one that hangs leaves time for another
			asked = time.Now()
			held, err := h.renew(ctx)
			switch {
			case err == nil && held:
			case err == nil || time.Since(*h.renewed.Load()) > h.o.cfg.Lock:
				if ctx.Err() == nil && !h.ending.Load() {
					h.o.cfg.Logger.WarnContext(ctx, "the lock of a key is lost: another worker goes on with it", "key", h.key, "error", err)
				}
				lose(ErrLockLost)
				return
			}
		}
	})
	return func() {
		lose(nil)
		group.Wait()
	}
}

// stolen tells, until stop is called, whether the lock was lost.
func (h *holder) stolen() bool { return errors.Is(context.Cause(h.working), ErrLockLost) }

func (h *holder) renew(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, h.o.cfg.Lock/3)
	defer cancel()
	asked := time.Now()
	held, err := h.update(ctx, h.o.sql.flow.renew, h.o.cfg.Lock)
	if held && err == nil {
		h.renewed.Store(&asked)
	}
	return held, err
}

// sure renews the lock where it may have run out: of a process that was frozen, or a machine that was suspended, whose monotonic clock
// stands still meanwhile.
func (h *holder) sure(ctx context.Context) error {
	at := *h.renewed.Load()
	if time.Since(at) < h.o.cfg.Lock && time.Now().Round(0).Sub(at.Round(0)) < h.o.cfg.Lock {
		return nil
	}
	held, err := h.renew(ctx)
	if err == nil && !held {
		return ErrLockLost
	}
	return err
}

// update writes under the token, and tells whether it still counts. It waits for a phase that is being committed, which is a
// conflict where the role's default is not read committed.
func (h *holder) update(ctx context.Context, sql string, args ...any) (bool, error) {
	for attempt := 1; ; attempt++ {
		tag, err := h.o.pool.Exec(ctx, sql, append([]any{h.key.Scope, h.key.Operation, h.key.Value, h.at.token}, args...)...)
		if err == nil || attempt > h.o.cfg.Retries || !conflict(err) {
			return tag.RowsAffected() == 1, err
		}
	}
}

// calling writes down that a call is about to be made which must not be made twice. It takes none of the call's time.
func (h *holder) calling(phase string) error {
	ctx, cancel := context.WithTimeout(h.working, h.o.cfg.StatementTimeout)
	defer cancel()
	rows, err := h.o.durably(ctx, h.o.sql.flow.calling, h.key.Scope, h.key.Operation, h.key.Value, h.at.token, phase)
	if err != nil {
		return fmt.Errorf("write down the call of phase %q: %w", phase, err)
	}
	if rows == 0 {
		return ErrLockLost
	}
	h.noted, h.doubtful = phase, true
	return nil
}

// unlock gives the key up for now. That must also be said when the caller's context is over; if it is not, the lock runs
// out by itself.
func (h *holder) unlock(ctx context.Context, cause error, retryAfter time.Duration, notCalled bool) error {
	ctx, cancel := h.lastWords(ctx)
	defer cancel()
	var withdrawn *string
	if notCalled && h.noted != "" {
		withdrawn = &h.noted
	}
	if _, err := h.update(ctx, h.o.sql.flow.unlock, text(cause), retryAfter, withdrawn, h.uncalled); err != nil {
		return fmt.Errorf("give up the lock of %v, which runs out by itself: %w", h.key, err)
	}
	return nil
}

// undecided hands the key to people, and after a while to the reconciler: what may still be on its way has arrived then. It
// tells whether the key was the holder's.
func (h *holder) undecided(ctx context.Context, to state, cause error, wait time.Duration) (bool, error) {
	ctx, cancel := h.lastWords(ctx)
	defer cancel()
	rows, err := h.o.durably(ctx, h.o.sql.flow.undecided, h.key.Scope, h.key.Operation, h.key.Value, h.at.token, to, text(cause), wait)
	if err != nil {
		return false, fmt.Errorf("mark %v as %s: %w", h.key, to, err)
	}
	if rows > 0 {
		h.o.cfg.Logger.ErrorContext(ctx, "a key needs a person: see outbox-relay keys", "key", h.key, "state", to, "error", cause)
	}
	return rows > 0, nil
}

// doubt hands the key to people because of a call of which only they can say what became of it.
func (h *holder) doubt(ctx context.Context, cause error, wait time.Duration) error {
	_, err := h.undecided(ctx, indeterminate, cause, wait)
	return errors.Join(ErrIndeterminate, cause, err)
}

// finish stores an outcome without effects.
func (h *holder) finish(ctx context.Context, response Response) error {
	ctx, cancel := h.lastWords(ctx)
	defer cancel()
	out, err := h.o.outcome(h.key, response, h.at.sealed)
	if err != nil {
		return err
	}
	_, err = h.o.durably(ctx, h.o.sql.flow.finish, h.key.Scope, h.key.Operation, h.key.Value, h.at.token, h.expired, out.status, out.headers, out.body, out.dropped, h.o.window())
	if lost(err) {
		return fmt.Errorf("%w: %w", ErrLockLost, err)
	}
	if err != nil {
		return fmt.Errorf("store the outcome of %v: %w", h.key, err)
	}
	return nil
}

// lastWords outlives the caller's context a little.
func (h *holder) lastWords(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), h.o.cfg.StatementTimeout)
}
