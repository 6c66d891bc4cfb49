package consumer

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// run is one execution of a transaction, in a goroutine of its own: a handler that ends its goroutine ends
// only that, and one that does not end at all is left behind.
type run struct {
	tx         *tx
	committing chan struct{} // closed when nothing but the COMMIT is left
	done       chan struct{}
	places     atomic.Pointer[[]int] // in the batch, of the messages that the handler has
	outcome    outcome
	err        error
}

// culprit makes an error the one of the message that was being handled.
func (r *run) culprit(err error) error {
	places, index := r.places.Load(), int(r.tx.index.Load())
	if places == nil || index < 0 || index+int(r.tx.base.Load()) >= len(*places) {
		return &batchError{err}
	}
	return &messageError{(*places)[index+int(r.tx.base.Load())], err}
}

// What a run waits for that does not end in time.
const (
	// commitGrace is how long a stopping consumer waits for the answer to a COMMIT.
	commitGrace = time.Second
	// cutGrace is how long a handler whose context was cancelled may take to return, and again after its
	// connection was cut.
	cutGrace = 2 * time.Second
)

var (
	// errGoexit stands for a handler that ended its goroutine, as t.FailNow does.
	errGoexit           = errors.New("handler ended its goroutine (runtime.Goexit)")
	errHandlerTimeout   = errors.New("handler took longer than HandlerTimeout")
	errContextIgnored   = errors.New("handler ignored the end of its context: its connection was cut and its goroutine left behind; pass ctx to everything that waits")
	errCommitUnanswered = errors.New("the database did not answer COMMIT before the consumer had to stop: whether it committed is found out by whoever runs the messages next")
)

// apply does work in one transaction. After an error nothing of it is committed, except when the connection
// was lost during COMMIT: then nobody knows, and running it again finds out, since the claims are there or
// not.
//
// When ctx ends it waits for the rollback, but not for ever for a COMMIT that the server does not answer, nor
// for a handler that does not return: these are left to themselves, and to whoever runs the messages next.
func (e *engine) apply(ctx context.Context, w *work) (outcome, error) {
	conn, err := e.pool.Acquire(ctx)
	if err != nil {
		return outcome{}, fmt.Errorf("get a database connection: %w", err)
	}
	limited, cancel := context.WithCancelCause(ctx)
	r := &run{
		tx:         &tx{conn: conn.Conn(), late: e.usedLate, begun: time.Now(), idleMax: e.cfg.IdleTimeout},
		committing: make(chan struct{}), done: make(chan struct{}), err: errGoexit,
	}
	go func() {
		defer close(r.done)
		defer conn.Release()
		r.outcome, r.err = e.transact(limited, w, r)
	}()
	defer cancel(nil)
	return e.watch(ctx, cancel, r)
}

// watch waits for a run to end.
func (e *engine) watch(ctx context.Context, cancel context.CancelCauseFunc, r *run) (outcome, error) {
	timer := time.NewTimer(e.cfg.HandlerTimeout)
	defer timer.Stop()
	committing := r.committing
	for {
		select {
		case <-r.done:
			return r.outcome, r.err
		case <-committing:
			timer.Stop()
			committing = nil
		case <-ctx.Done():
			return e.cut(r)
		case <-timer.C:
			if left := r.tx.left(e.cfg.HandlerTimeout); left > 0 {
				timer.Reset(left)
				continue
			}
			cancel(errHandlerTimeout)
			return e.cut(r)
		}
	}
}

// left is what remains of the limit for the message being handled.
func (t *tx) left(limit time.Duration) time.Duration {
	since := t.since.Load()
	if since == 0 {
		return limit // the engine is at work, under the limits of its statements
	}
	return limit - (time.Since(t.begun) - time.Duration(since))
}

// cut ends a run whose context is over.
func (e *engine) cut(r *run) (outcome, error) {
	grace := time.NewTimer(cutGrace)
	defer grace.Stop()
	select {
	case <-r.done:
		return r.outcome, r.err
	case <-r.committing:
		grace.Reset(commitGrace)
		select {
		case <-r.done:
			return r.outcome, r.err
		case <-grace.C:
			return outcome{}, errCommitUnanswered
		}
	case <-grace.C:
	}
	r.tx.over.Store(true)
	_ = r.tx.conn.PgConn().Conn().Close() // the server rolls back
	grace.Reset(cutGrace)
	select {
	case <-r.done:
		return r.outcome, r.err
	case <-grace.C:
		return outcome{}, r.culprit(errContextIgnored)
	}
}

// usedLate reports a handler that kept its transaction.
func (e *engine) usedLate(msg *Message) {
	attrs := []any{"group", e.cfg.Group}
	if msg != nil {
		attrs = append(attrs, "topic", msg.Topic, "partition", msg.Partition, "offset", msg.Offset, "id", msg.ID)
	}
	e.cfg.Logger.Error("handler used its transaction after it returned; the statement was refused: do not keep the transaction, and wait for goroutines that use it", attrs...)
}
