package consumer

import (
	"context"
	"errors"
	"runtime/debug"
	"strings"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/effectonce/effectonce/internal/handlertx"
	"github.com/effectonce/effectonce/outbox"
)

// Handler is what a consumer does with messages. Create one with Each, JSON, Queued, Batch or
// Route.
type Handler interface {
	// handle handles the fresh messages of a batch, in order. It returns a *messageError.
	handle(ctx context.Context, t *tx, msgs []*Message) error
}

// Each returns a handler that gets one message at a time and the transaction. An error rolls the
// batch back; see Permanent for errors that a retry cannot fix. Panics become errors.
func Each(handle func(ctx context.Context, tx pgx.Tx, msg *Message) error) Handler {
	return eachHandler(handle)
}

type eachHandler func(ctx context.Context, tx pgx.Tx, msg *Message) error

func (h eachHandler) handle(ctx context.Context, t *tx, msgs []*Message) error {
	for _, msg := range msgs {
		t.turn(msg)
		view := t.view(msg)
		err := guard(func() error { return h(ctx, view, msg) })
		view.done.Store(true)
		if err == nil {
			err = overdue(ctx)
		}
		if err = t.inspect(err); err != nil {
			return blame(err, msg)
		}
	}
	return nil
}

// Batch returns a handler that gets all fresh messages of a batch at once, for statements over sets
// and for COPY. If it fails, the batch is split until the failing message is alone, unless the
// handler names that message: see Blame. A message that it publishes needs an ID: msg.PublishID of
// its parent.
func Batch(handle func(ctx context.Context, tx pgx.Tx, msgs []*Message) error) Handler {
	return batchHandler(handle)
}

type batchHandler func(ctx context.Context, tx pgx.Tx, msgs []*Message) error

func (h batchHandler) handle(ctx context.Context, t *tx, msgs []*Message) error {
	t.turn(nil)
	view := t.view(nil)
	err := t.inspect(guard(func() error { return h(ctx, view, msgs) }))
	view.done.Store(true)
	if err == nil {
		return nil
	}
	return blame(err, msgs...)
}

// Queue collects the statements of a batch. They are sent in one round trip after all messages were
// handled. That is several times faster than one statement at a time, and suits handlers that only
// write.
type Queue struct {
	batch *pgx.Batch
	owner []*Message // of each statement
	view  *messageTx
	sent  bool
}

// Queue adds a statement. The callbacks of pgx.QueuedQuery can read its result; they run after all
// messages were handled. If a statement fails, its message fails.
func (q *Queue) Queue(sql string, args ...any) *pgx.QueuedQuery {
	if q.sent {
		_ = q.view.Misused(errQueuedLate)
	} else if q.view.Refuse(sql) == nil { // else noted, and reported when the handler returns
		q.view.Statement(sql)
	}
	q.owner = append(q.owner, q.view.msg)
	return q.batch.Queue(sql, args...)
}

var errQueuedLate = errors.New("handler queued a statement after the queue was sent: it would have no effect; use the callbacks of QueuedQuery to read results only")

// Publish publishes messages with derived IDs, in the same transaction; see outbox.Publish.
func (q *Queue) Publish(ctx context.Context, msgs ...outbox.Message) error {
	return outbox.Publish(ctx, q.view, msgs...)
}

// Queued returns a handler that queues statements instead of waiting for each.
func Queued(handle func(ctx context.Context, q *Queue, msg *Message) error) Handler {
	return queuedHandler(handle)
}

type queuedHandler func(ctx context.Context, q *Queue, msg *Message) error

func (h queuedHandler) handle(ctx context.Context, t *tx, msgs []*Message) error {
	q := &Queue{batch: &pgx.Batch{QueuedQueries: make([]*pgx.QueuedQuery, 0, len(msgs))}, owner: make([]*Message, 0, len(msgs)), view: t.view(nil)}
	defer q.view.done.Store(true)
	if err := guard(func() error { return h.collect(ctx, t, q, msgs) }); err != nil {
		return blame(err, q.view.msg)
	}
	if q.batch.Len() == 0 {
		return nil
	}
	return h.send(ctx, t, q, len(msgs))
}

// send sends the queued statements in one round trip for the whole batch. A timeout of that round
// trip is not attributed to any message.
func (h queuedHandler) send(ctx context.Context, t *tx, q *Queue, messages int) error {
	t.turn(nil)
	t.busy.Store(true)
	q.sent = true
	read := 0 // how far the results were read: attributes an error to its message
	err := guard(func() error { return send(ctx, t.conn, q.batch, &read) })
	t.busy.Store(false)
	if err = t.inspect(err); err == nil {
		return nil
	}
	var answered *pgconn.PgError
	var panicked *PanicError
	known := errors.As(err, &panicked) || errors.As(err, &answered) && (read > 0 || !strings.HasPrefix(answered.Code, "42"))
	if messages > 1 && !known {
		// Without an answer, any message may be at fault. The same is true if PostgreSQL refused to
		// prepare a statement.
		return blame(err)
	}
	return blame(err, q.owner[min(read, len(q.owner)-1)])
}

// collect calls the handler for each message. If it fails or panics, q.view.msg is the message.
func (h queuedHandler) collect(ctx context.Context, t *tx, q *Queue, msgs []*Message) error {
	for _, msg := range msgs {
		t.turn(msg)
		q.view.msg = msg
		if err := h(ctx, q, msg); err != nil {
			return err
		}
		if err := t.misuse(); err != nil {
			return Permanent(err)
		}
		if err := overdue(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Middleware wraps a handler. Create one with Around.
type Middleware func(next Handler) Handler

// Around returns a Middleware for any kind of handler, for example for tracing, tenancy or metrics.
// around is called for each call of the handler, with its transaction and its messages: one message
// with Each, JSON and Decode of such a function, all fresh messages of the transaction with Queued,
// Batch and Route. It must call next once, with ctx or a context derived from it, and wait for it.
//
// It cannot hide a failure: next's error is the outcome even if around returns nil, and an error of
// around is a failure of its messages. If around does not call next, the messages have had no
// effect, so they fail.
func Around(around func(ctx context.Context, tx pgx.Tx, msgs []*Message, next func(ctx context.Context) error) error) Middleware {
	return func(next Handler) Handler { return &wrapped{around: around, next: next} }
}

type wrapped struct {
	around func(ctx context.Context, tx pgx.Tx, msgs []*Message, next func(ctx context.Context) error) error
	next   Handler
}

var (
	errNextTwice  = errors.New("middleware called next twice: the handler would have its effect twice")
	errNextLate   = errors.New("middleware returned before next did, or called next later: wait for next")
	errNextNotRun = errors.New("middleware returned without calling next: the message would be lost; return an error, or call next")
)

// single reports whether a handler gets one message at a time.
func single(h Handler) bool {
	if w, ok := h.(*wrapped); ok {
		return single(w.next)
	}
	_, ok := h.(eachHandler)
	return ok
}

func (w *wrapped) handle(ctx context.Context, t *tx, msgs []*Message) error {
	if !single(w.next) {
		return w.call(ctx, t, msgs)
	}
	for i := range msgs {
		if err := w.call(ctx, t, msgs[i:i+1]); err != nil {
			return err
		}
	}
	return nil
}

// call calls around once.
func (w *wrapped) call(ctx context.Context, t *tx, msgs []*Message) error {
	var one *Message
	if len(msgs) == 1 {
		one = msgs[0]
	}
	t.turn(one)
	view := t.view(one)
	defer view.done.Store(true)
	var state atomic.Int32 // 1: next was called, 2: it returned, 3: around returned
	var inner error
	next := func(ctx context.Context) error {
		if !state.CompareAndSwap(0, 1) {
			if state.Load() == 3 {
				return errNextLate
			}
			return t.Misused(errNextTwice)
		}
		err := guard(func() error { return w.next.handle(ctx, t, msgs) })
		inner = err
		state.CompareAndSwap(1, 2)
		return err
	}
	outer := guard(func() error { return w.around(ctx, view, msgs, next) })
	called := state.Swap(3)
	switch {
	case called == 1:
		// The handler may still run: it cannot use the transaction any more, which rolls back.
		t.over.Store(true)
		outer = Permanent(t.Misused(errNextLate))
	case called == 2 && inner != nil:
		outer = inner
	case t.misuse() != nil:
		outer = Permanent(t.misuse())
	case outer == nil && called == 0:
		outer = Permanent(errNextNotRun)
	case outer == nil:
		outer = t.inspect(nil)
	}
	if outer == nil {
		return nil
	}
	return blame(outer, msgs...)
}

// overdue returns why a handler that returned nil has failed anyway: its time was over. Without
// this check the next message would fail in its place.
func overdue(ctx context.Context) error {
	if ctx.Err() == nil {
		return nil
	}
	return context.Cause(ctx)
}

// guard turns a panic into an error. That includes panics in the methods of the error that f
// returns: the engine calls them later, where nothing would recover. runtime.Goexit ends the
// attempt's goroutine; the engine's defer rolls its transaction back.
func guard(f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	if err = f(); err != nil {
		_ = err.Error()
		_ = IsPermanent(err) // calls Unwrap and As of each error inside
		_ = errors.Is(err, errFenced)
	}
	return err
}

var errSwallowed = errors.New("handler returned nil although one of its statements failed: return the error; nothing of the batch was committed")

var errIdle = errors.New("handler did nothing in its transaction for IdleTimeout, and the server ended it: do slow work before the transaction, take fewer messages (BatchMax), or raise IdleTimeout")

var errEnded = errors.New("handler ended the transaction itself: return nil to commit, or an error to roll back")

var errRowsOpen = errors.New("handler left a result open: close the rows before returning")

// inspect checks, without a round trip, the state in which a handler left the transaction. It
// returns why the message failed, or nil.
func (t *tx) inspect(err error) error {
	if misuse := t.misuse(); misuse != nil {
		if errors.Is(err, misuse) { // the handler returned it, too
			return Permanent(err)
		}
		return Permanent(errors.Join(misuse, err))
	}
	if handlertx.Ended(err) {
		return Permanent(errors.Join(errEnded, err))
	}
	if t.conn.IsClosed() {
		// The handler's own context ended, which closed the connection.
		if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		if t.idled() {
			return blame(errors.Join(errIdle, err))
		}
		return errors.Join(errConnectionLost, err)
	}
	if err != nil {
		return err
	}
	if t.busy.Load() {
		return Permanent(errShared)
	}
	if t.conn.PgConn().IsBusy() {
		return Permanent(errRowsOpen)
	}
	switch t.conn.PgConn().TxStatus() {
	case 'T':
		return nil
	case 'E':
		return errSwallowed
	default:
		return Permanent(errEnded)
	}
}
