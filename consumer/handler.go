package consumer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/outbox"
)

// Handler is what a consumer does with messages. Make one with Each, Queued or JSON.
type Handler interface {
	// handle works on the fresh messages of a batch, in order. A *messageError names the one that failed.
	handle(ctx context.Context, t *tx, msgs []*Message) error
}

// Each makes a handler that gets one message at a time and the transaction. An error rolls the batch
// back; see Permanent for those that trying again cannot mend. Panics become errors.
func Each(handle func(ctx context.Context, tx pgx.Tx, msg *Message) error) Handler {
	return eachHandler(handle)
}

type eachHandler func(ctx context.Context, tx pgx.Tx, msg *Message) error

func (h eachHandler) handle(ctx context.Context, t *tx, msgs []*Message) error {
	for i, msg := range msgs {
		t.current = msg
		err := guard(func() error { return h(ctx, t, msg) })
		if err = t.verdict(err); err != nil {
			return &messageError{i, err}
		}
	}
	return nil
}

// JSON makes a handler like Each that decodes the value first. A value that is no JSON of that form is
// a permanent failure.
func JSON[T any](handle func(ctx context.Context, tx pgx.Tx, msg *Message, body T) error) Handler {
	return Each(func(ctx context.Context, tx pgx.Tx, msg *Message) error {
		var body T
		if err := json.Unmarshal(msg.Value, &body); err != nil {
			return Permanent(fmt.Errorf("value is no JSON of the expected form: %w", err))
		}
		return handle(ctx, tx, msg, body)
	})
}

// Queue collects the statements of a batch; they are sent in one round trip when all messages were
// handled. That is several times faster than a statement at a time, and fits handlers that only write.
type Queue struct {
	batch   *pgx.Batch
	owner   []int // message of each statement
	current int
	tx      *tx
}

// Queue adds a statement. Callbacks on the returned query run when the results are read; an error from
// one fails the message.
func (q *Queue) Queue(sql string, args ...any) *pgx.QueuedQuery {
	q.owner = append(q.owner, q.current)
	return q.batch.Queue(sql, args...)
}

// Publish publishes messages with derived IDs, in the same transaction; see outbox.Publish.
func (q *Queue) Publish(ctx context.Context, msgs ...outbox.Message) error {
	return outbox.Publish(ctx, q.tx, msgs...)
}

// Queued makes a handler that queues statements instead of waiting for each.
func Queued(handle func(ctx context.Context, q *Queue, msg *Message) error) Handler {
	return queuedHandler(handle)
}

type queuedHandler func(ctx context.Context, q *Queue, msg *Message) error

func (h queuedHandler) handle(ctx context.Context, t *tx, msgs []*Message) error {
	q := &Queue{batch: &pgx.Batch{}, tx: t}
	for i, msg := range msgs {
		t.current, q.current = msg, i
		if err := guard(func() error { return h(ctx, q, msg) }); err != nil {
			return &messageError{i, err}
		}
	}
	if q.batch.Len() == 0 {
		return nil
	}
	// Each callback notes how far the results were read, so that an error finds its message.
	read := 0
	for i, query := range q.batch.QueuedQueries {
		after := query.Fn
		query.Fn = func(br pgx.BatchResults) error {
			read = i
			if after != nil {
				return after(br)
			}
			_, err := br.Exec()
			return err
		}
	}
	err := guard(func() error { return t.conn.SendBatch(ctx, q.batch).Close() })
	if err = t.verdict(err); err != nil {
		return &messageError{q.owner[read], err}
	}
	return nil
}

// guard turns a panic into an error. runtime.Goexit ends the goroutine of the partition; its transaction
// is rolled back by the engine's defer.
func guard(f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	return f()
}

var errSwallowed = errors.New("handler returned nil although one of its statements failed: return the error; nothing of the batch was committed")

var errEnded = errors.New("handler ended the transaction itself: return nil to commit, or an error to roll back")

var errRowsOpen = errors.New("handler left a result open: close the rows before returning")

// verdict looks, without a round trip, at what a handler left behind, and returns why the message
// failed, or nil.
func (t *tx) verdict(err error) error {
	if t.misuse != nil {
		return Permanent(errors.Join(t.misuse, err))
	}
	if t.conn.IsClosed() {
		// A handler whose own context ended broke the connection itself.
		if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		return errors.Join(errConnectionLost, err)
	}
	if err != nil {
		return err
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
