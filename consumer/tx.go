package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
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

	begun   time.Time
	idleMax time.Duration           // after which the server ends the transaction
	used    atomic.Int64            // when a handler's last statement ended, in nanoseconds after begun
	tooLate atomic.Bool             // the next statement came later than idleMax after it
	current atomic.Pointer[Message] // being handled; nil in a function that got several
	since   atomic.Int64            // when its handling began, in nanoseconds after begun; 0: no user code runs
	owning  sync.Mutex              // guards what user functions' results are stored in: see own

	collected  []collected      // outbox messages, in order
	published  map[*Message]int // for each message, how many its handler published: the step of the next one's ID
	savepoints int              // created through Begin
	marks      []mark           // savepoints that exist
	server     time.Time        // when the server started
	role       string           // before a handler changed it
	session    bool             // a handler changed roles, settings or other state of the session
	lasting    bool             // and the change would outlast the transaction
}

// mark is a savepoint, and how many messages were published before it.
type mark struct {
	name      string
	collected int
}

// turn sets the message that is handled from now on; nil: several.
func (t *tx) turn(msg *Message) {
	if t.current.Swap(msg) != msg {
		t.marks = nil // a savepoint of another message would take that one's effects back
	}
	t.since.Store(int64(time.Since(t.begun)) + 1)
}

// own runs f unless the attempt was abandoned: then its messages are in use elsewhere.
func (t *tx) own(f func()) bool {
	t.owning.Lock()
	defer t.owning.Unlock()
	if t.over.Load() {
		return false
	}
	f()
	return true
}

// leave ends the attempt's right to its messages.
func (t *tx) leave() {
	t.owning.Lock()
	defer t.owning.Unlock()
	t.over.Store(true)
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
	msg    *Message // whose handler published; nil: a handler of several
	upTo   int      // statements of the last round trip, up to its last one
}

// publisher returns the message whose handler published what a statement of the last round trip
// inserts; nil: unknown.
func (t *tx) publisher(statement int) *Message {
	for _, c := range t.collected {
		if statement < c.upTo {
			return c.msg
		}
	}
	return nil
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
			m.ID = v.msg.publishID("publish:"+strconv.Itoa(v.published[v.msg]), !m.DeliverAt.IsZero())
		}
		v.published[v.msg]++
		m.Headers = withTrace(m.Headers, v.msg)
		derived[i] = m
	}
	v.collected = append(v.collected, collected{outbox: o, msgs: derived, msg: v.msg})
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

// Statement implements handlertx.Gate. It follows savepoints: a rollback to one drops the messages
// that were published since. And it notices statements that change the session, which must not
// reach the next message.
func (v *messageTx) Statement(sql string) {
	t := v.tx
	for _, one := range handlertx.Statements(sql) {
		verb, rest := handlertx.Verb(one)
		switch at := t.marked(rest); {
		case verb == "savepoint":
			t.marks = append(t.marks, mark{lastName(rest), len(t.collected)})
		case verb != "release" && verb != "rollback":
		case at < 0: // it may be another message's
			_ = v.Misused(errSavepoint)
		case verb == "release":
			t.marks = t.marks[:at]
		default:
			t.collected, t.marks = t.collected[:t.marks[at].collected], t.marks[:at+1]
		}
	}
	if changes, lasts := handlertx.Session(sql); changes || lasts { // it may be late, in a goroutine that was left behind
		t.session, t.lasting = true, t.lasting || lasts
	}
}

var errSavepoint = errors.New("handler released, or rolled back to, a savepoint that it did not set for this message: what it has published since is not known")

// lastName is the name at the end of a statement about a savepoint.
func lastName(text string) string {
	words := strings.Fields(text)
	if len(words) == 0 {
		return ""
	}
	return strings.ToLower(strings.Trim(words[len(words)-1], `"`))
}

// marked returns the index of the newest savepoint of that name; -1: there is none.
func (t *tx) marked(text string) int {
	name, at := lastName(text), len(t.marks)-1
	for at >= 0 && t.marks[at].name != name {
		at--
	}
	return at
}

// savepoint is a nested transaction of a handler.
type savepoint struct {
	pgx.Tx
	view *messageTx
}

// Begin starts a savepoint.
func (v *messageTx) Begin(ctx context.Context) (pgx.Tx, error) {
	inner, err := v.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &savepoint{inner, v}, nil
}

// Begin starts a savepoint inside the savepoint.
func (s *savepoint) Begin(ctx context.Context) (pgx.Tx, error) { return s.view.Begin(ctx) }

// CollectOutbox implements outbox.Collector.
func (s *savepoint) CollectOutbox(o *outbox.Outbox, msgs []outbox.Message) error {
	return s.view.CollectOutbox(o, msgs)
}
