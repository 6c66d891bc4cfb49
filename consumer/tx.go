package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/handlertx"
	"github.com/effectonce/effectonce/outbox"
)

// tx is one transaction of the engine, with the state that the handlers of its messages leave.
type tx struct {
	conn  *pgx.Conn
	late  func(msg *Message) // reports a use after the handler returned
	over  atomic.Bool        // it must no longer be used
	busy  atomic.Bool        // a statement of a handler is in progress
	fault atomic.Pointer[error]

	backend atomic.Int32 // process number of the server's session
	begun   time.Time
	idleMax time.Duration // after which the server ends the transaction
	used    atomic.Int64  // when a handler's last statement ended, in nanoseconds after begun
	tooLate atomic.Bool   // the next statement came later than idleMax after it
	current *Message      // being handled; nil in a handler of whole batches
	index   atomic.Int64  // of current in the handler's messages
	base    atomic.Int64  // index of the first of them in the batch, if a router splits it
	since   atomic.Int64  // when its handling began, in nanoseconds after begun; 0: no handler runs

	collected  []collected // outbox messages, in order
	savepoints int
}

// turn sets the message that is handled from now on.
func (t *tx) turn(index int, msg *Message) {
	t.current = msg
	t.index.Store(int64(index))
	t.since.Store(int64(time.Since(t.begun)) + 1)
}

// idled reports whether nothing was sent to the server for so long that the server may have ended
// the transaction.
func (t *tx) idled() bool {
	return t.tooLate.Load() || time.Since(t.begun)-time.Duration(t.used.Load()) >= t.idleMax
}

// Misused records a misuse by a handler; the first one counts.
func (t *tx) Misused(err error) error {
	t.fault.CompareAndSwap(nil, &err)
	return err
}

func (t *tx) misuse() error {
	if err := t.fault.Load(); err != nil {
		return *err
	}
	return nil
}

// messageTx is the transaction as the handler of one message gets it. Messages published through it
// are collected and inserted at the end.
type messageTx struct {
	*handlertx.Tx
	*tx
	msg  *Message // nil in a handler of whole batches
	done atomic.Bool
}

// view returns the transaction for the handler of a message, or of a whole batch if msg is nil.
func (t *tx) view(msg *Message) *messageTx {
	v := &messageTx{tx: t, msg: msg}
	v.Tx = handlertx.New(t.conn, v, &t.savepoints)
	return v
}

// collected is the messages of one Publish call.
type collected struct {
	outbox *outbox.Outbox
	msgs   []outbox.Message
	index  int // of the message whose handler published, in the handler's messages; unknownIndex: of a batch
	upTo   int // statements of the last round trip, up to its last one
}

// publisher returns the index of the message whose handler published what a statement of the last
// round trip inserts.
func (t *tx) publisher(statement int) int {
	for _, c := range t.collected {
		if statement < c.upTo {
			return c.index
		}
	}
	return unknownIndex
}

var (
	_ pgx.Tx           = (*messageTx)(nil)
	_ outbox.Collector = (*messageTx)(nil)
	_ handlertx.Gate   = (*messageTx)(nil)
	_ pgx.Tx           = (*savepoint)(nil)
	_ outbox.Collector = (*savepoint)(nil)
)

// errOver is returned to a handler that kept the transaction after it returned.
var errOver = fmt.Errorf("the transaction of a handler is over when the handler returns: %w", pgx.ErrTxClosed)

// errShared is returned to a handler that uses the transaction concurrently.
var errShared = errors.New("handler used its transaction from two goroutines, or while a result was open: use it from one, and close rows first")

// Enter implements handlertx.Gate.
func (v *messageTx) Enter() error {
	if v.over.Load() || v.done.Load() {
		if v.late != nil {
			v.late(v.msg)
		}
		return errOver
	}
	if !v.busy.CompareAndSwap(false, true) {
		return v.Misused(errShared)
	}
	if v.over.Load() || v.done.Load() { // the engine has ended it and saw no statement in progress
		v.busy.Store(false)
		return errOver
	}
	v.tooLate.Store(v.idled())
	return nil
}

// Failed implements handlertx.Gate. It does nothing: inspect finds the failure at the end of the
// batch.
func (v *messageTx) Failed(error) {}

// Leave implements handlertx.Gate. It also records that pgx found the connection busy.
func (v *messageTx) Leave(err error) {
	v.used.Store(int64(time.Since(v.begun)))
	v.busy.Store(false)
	if err != nil && strings.Contains(err.Error(), "conn busy") {
		_ = v.Misused(errShared)
	}
}

// errNoParent is returned to a batch handler for a published message without an ID.
var errNoParent = errors.New("a message published by a handler of whole batches needs an ID: derive it from its parent with msg.PublishID, or a re-execution would publish it under another")

// CollectOutbox keeps messages until the end of the batch: inserted by the last statement, they
// come after every lock that orders their keys. A message without an ID gets one that is derived
// from the message being handled and from the published message's place in the handler, so that a
// re-execution publishes it under the same ID. It also propagates the trace context.
func (v *messageTx) CollectOutbox(o *outbox.Outbox, msgs []outbox.Message) error {
	if err := v.Enter(); err != nil {
		return err
	}
	defer v.Leave(nil)
	derived := make([]outbox.Message, len(msgs))
	for i, m := range msgs {
		if v.msg == nil {
			if m.ID == uuid.Nil {
				return v.Misused(errNoParent)
			}
			derived[i] = m
			continue
		}
		if m.ID == uuid.Nil {
			m.ID = v.msg.publishID("publish:"+strconv.Itoa(v.msg.published), !m.DeliverAt.IsZero())
		}
		v.msg.published++
		m.Headers = withTrace(m.Headers, v.msg)
		derived[i] = m
	}
	index := unknownIndex
	if v.msg != nil {
		index = int(v.index.Load() + v.base.Load())
	}
	v.collected = append(v.collected, collected{outbox: o, msgs: derived, index: index})
	return nil
}

// publishID derives the ID of a published message. The ID of a message for later contains no time:
// the parent's time would be too old for the next consumer, and DeliverAt may differ in a
// re-execution.
func (m *Message) publishID(step string, later bool) uuid.UUID {
	if later {
		return dedup.LaterID(m.scope, m.ID, step)
	}
	return m.PublishID(step)
}

// traceParentBytesMax is generous: a traceparent has 55 bytes. The size of the message was checked
// before.
const traceParentBytesMax = 100

// withTrace adds the trace context of the parent if the child has none.
func withTrace(headers []outbox.Header, parent *Message) []outbox.Header {
	value, ok := parent.Header(outbox.HeaderTraceParent)
	if !ok || len(value) > traceParentBytesMax || slices.ContainsFunc(headers, func(h outbox.Header) bool { return h.Name == outbox.HeaderTraceParent }) {
		return headers
	}
	return append(headers[:len(headers):len(headers)], outbox.Header{Name: outbox.HeaderTraceParent, Value: value})
}

// savepoint is a nested transaction of a handler. A rollback also drops the messages that were
// published inside it.
type savepoint struct {
	pgx.Tx
	view      *messageTx
	collected int
}

// Begin starts a savepoint.
func (v *messageTx) Begin(ctx context.Context) (pgx.Tx, error) {
	inner, err := v.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &savepoint{Tx: inner, view: v, collected: len(v.collected)}, nil
}

// Begin starts a savepoint inside the savepoint.
func (s *savepoint) Begin(ctx context.Context) (pgx.Tx, error) { return s.view.Begin(ctx) }

// CollectOutbox implements outbox.Collector.
func (s *savepoint) CollectOutbox(o *outbox.Outbox, msgs []outbox.Message) error {
	return s.view.CollectOutbox(o, msgs)
}

// Rollback rolls back to the savepoint.
func (s *savepoint) Rollback(ctx context.Context) error {
	err := s.Tx.Rollback(ctx)
	if err == nil {
		s.view.collected = s.view.collected[:s.collected]
	}
	return err
}
