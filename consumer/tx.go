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

// tx is one transaction of the engine, with what the handlers of its messages left behind.
type tx struct {
	conn  *pgx.Conn
	late  func(msg *Message) // reports a use after the handler returned
	over  atomic.Bool        // it may not be used any more
	busy  atomic.Bool        // a statement of a handler is under way
	fault atomic.Pointer[error]

	backend atomic.Int32 // process number of the server's session
	begun   time.Time
	idleMax time.Duration // after which the server ends the transaction
	used    atomic.Int64  // when a handler's last statement ended, in nanoseconds after begun
	tooLate atomic.Bool   // the next came later than idleMax after it
	current *Message      // being handled; nil in a handler of whole batches
	index   atomic.Int64  // of current in the handler's messages
	base    atomic.Int64  // place of the first of them in the batch, where a router divides it
	since   atomic.Int64  // when its turn began, in nanoseconds after begun; 0: no handler is at work

	collected  []collected // outbox messages, in order
	savepoints int
}

// turn says which message is handled from now on.
func (t *tx) turn(index int, msg *Message) {
	t.current = msg
	t.index.Store(int64(index))
	t.since.Store(int64(time.Since(t.begun)) + 1)
}

// idled reports that nothing was sent to the server for so long that it may have ended the transaction.
func (t *tx) idled() bool {
	return t.tooLate.Load() || time.Since(t.begun)-time.Duration(t.used.Load()) >= t.idleMax
}

// Misused notes what a handler must not do; the first counts.
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

// messageTx is the transaction as the handler of one message gets it. Messages published through it are collected
// and inserted last.
type messageTx struct {
	*handlertx.Tx
	*tx
	msg  *Message // nil in a handler of whole batches
	done atomic.Bool
}

// view returns the transaction for the handler of a message, or of a whole batch where msg is nil.
func (t *tx) view(msg *Message) *messageTx {
	v := &messageTx{tx: t, msg: msg}
	v.Tx = handlertx.New(t.conn, v, &t.savepoints)
	return v
}

// collected is what one Publish call brought.
type collected struct {
	outbox *outbox.Outbox
	msgs   []outbox.Message
	index  int // of the message whose handler published, in the handler's messages; unknownIndex: of a batch
	upTo   int // statements of the last round trip, up to its last one
}

// publisher is whose handler published what the statement at a place of the last round trip inserts.
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

// errOver is what a handler gets that kept the transaction after it returned.
var errOver = fmt.Errorf("the transaction of a handler is over when the handler returns: %w", pgx.ErrTxClosed)

// errShared is what a handler gets that uses the transaction twice at a time.
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
	if v.over.Load() || v.done.Load() { // the engine, which ended it meanwhile, has seen no statement under way
		v.busy.Store(false)
		return errOver
	}
	v.tooLate.Store(v.idled())
	return nil
}

// Failed implements handlertx.Gate: the end of the batch finds out by itself.
func (v *messageTx) Failed(error) {}

// Leave also notes that pgx found the connection busy.
func (v *messageTx) Leave(err error) {
	v.used.Store(int64(time.Since(v.begun)))
	v.busy.Store(false)
	if err != nil && strings.Contains(err.Error(), "conn busy") {
		_ = v.Misused(errShared)
	}
}

// errNoParent is what a handler of whole batches gets for a message without an ID.
var errNoParent = errors.New("a message published by a handler of whole batches needs an ID: derive it from its parent with msg.OutboxID, or a re-execution would publish it under another")

// CollectOutbox keeps messages until the end of the batch: inserted as the last statement, they come
// after every lock that orders their keys. A message without an ID gets one that is derived from the
// message being handled and the message's place in the handler, so that a re-execution publishes it under
// the same ID. It also carries on the trace.
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

// publishID derives the ID of what is published. That of a message for later carries no time: the parent's would be
// too old for the next consumer, and DeliverAt may be another one at a re-execution.
func (m *Message) publishID(step string, later bool) uuid.UUID {
	if later {
		return dedup.MessageID("effectonce:later", append(m.ID[:len(m.ID):len(m.ID)], step...))
	}
	return m.OutboxID(step)
}

// traceParentBytesMax is generous: a traceparent has 55 bytes. The size of the message was checked before.
const traceParentBytesMax = 100

// withTrace adds the trace context of the parent where the child has none.
func withTrace(headers []outbox.Header, parent *Message) []outbox.Header {
	value, ok := parent.Header(outbox.HeaderTraceParent)
	if !ok || len(value) > traceParentBytesMax || slices.ContainsFunc(headers, func(h outbox.Header) bool { return h.Name == outbox.HeaderTraceParent }) {
		return headers
	}
	return append(headers[:len(headers):len(headers)], outbox.Header{Name: outbox.HeaderTraceParent, Value: value})
}

// savepoint is a nested transaction of a handler. What was published inside it is forgotten when it is
// rolled back.
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

// Rollback goes back to the savepoint.
func (s *savepoint) Rollback(ctx context.Context) error {
	err := s.Tx.Rollback(ctx)
	if err == nil {
		s.view.collected = s.view.collected[:s.collected]
	}
	return err
}
