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
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/outbox"
)

// tx is one transaction of the engine, with what the handlers of its messages left behind.
type tx struct {
	conn  *pgx.Conn
	late  func(msg *Message) // reports a use after the handler returned
	over  atomic.Bool        // nobody may use it any more
	busy  atomic.Bool        // a statement of a handler is under way
	fault atomic.Pointer[error]

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

// idled tells that nothing was sent to the server for so long that it may have ended the transaction.
func (t *tx) idled() bool {
	return t.tooLate.Load() || time.Since(t.begun)-time.Duration(t.used.Load()) >= t.idleMax
}

// misused notes what a handler must not do; the first counts.
func (t *tx) misused(err error) error {
	t.fault.CompareAndSwap(nil, &err)
	return err
}

func (t *tx) misuse() error {
	if err := t.fault.Load(); err != nil {
		return *err
	}
	return nil
}

// messageTx is the transaction as the handler of one message gets it. It is a pgx.Tx of its own, for four
// reasons: BEGIN shares a round trip with the claim and COMMIT one with the position, which pgx's own
// transaction cannot; a handler must not end it, nor use it after it returned or in two goroutines; and
// messages published through it are collected and inserted last.
type messageTx struct {
	*tx
	msg  *Message // nil in a handler of whole batches
	done atomic.Bool
}

// collected is what one Publish call brought.
type collected struct {
	outbox *outbox.Outbox
	msgs   []outbox.Message
}

var (
	_ pgx.Tx           = (*messageTx)(nil)
	_ outbox.Collector = (*messageTx)(nil)
	_ pgx.Tx           = (*savepoint)(nil)
	_ outbox.Collector = (*savepoint)(nil)
)

// errNotYours is what a handler gets that calls Commit or Rollback.
var errNotYours = errors.New("the consumer ends the transaction, not the handler: return nil to commit, or an error to roll back")

// errOver is what a handler gets that kept the transaction after it returned.
var errOver = fmt.Errorf("the transaction of a handler is over when the handler returns: %w", pgx.ErrTxClosed)

// errShared is what a handler gets that uses the transaction twice at a time.
var errShared = errors.New("handler used its transaction from two goroutines, or while a result was open: use it from one, and close rows first")

// enter begins a use of the transaction; leave ends it.
func (v *messageTx) enter() error {
	if v.over.Load() || v.done.Load() {
		if v.late != nil {
			v.late(v.msg)
		}
		return errOver
	}
	if !v.busy.CompareAndSwap(false, true) {
		return v.misused(errShared)
	}
	v.tooLate.Store(v.idled())
	return nil
}

// leave also notes that pgx found the connection busy.
func (v *messageTx) leave(err error) {
	v.used.Store(int64(time.Since(v.begun)))
	v.busy.Store(false)
	if err != nil && strings.Contains(err.Error(), "conn busy") {
		_ = v.misused(errShared)
	}
}

// Commit refuses: see errNotYours.
func (v *messageTx) Commit(context.Context) error { return v.misused(errNotYours) }

// Rollback refuses: see errNotYours.
func (v *messageTx) Rollback(context.Context) error { return v.misused(errNotYours) }

// Conn returns the connection of the transaction.
func (v *messageTx) Conn() *pgx.Conn { return v.conn }

// refuse keeps statements away that would end the transaction, and with it commit claims whose effects
// are still to come. What gets past it, fails at the server: see refuse_commit in the migrations.
func (v *messageTx) refuse(sql string) error {
	sql = strings.TrimLeft(sql, " \t\r\n;(")
	end := strings.IndexFunc(sql, func(r rune) bool { return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') })
	if end < 0 {
		end = len(sql)
	}
	switch strings.ToLower(sql[:end]) {
	case "commit", "end", "abort", "prepare":
	case "rollback":
		if slices.Contains(strings.Fields(strings.ToLower(sql)), "to") {
			return nil
		}
	default:
		return nil
	}
	return v.misused(errNotYours)
}

// Exec implements pgx.Tx.
func (v *messageTx) Exec(ctx context.Context, sql string, args ...any) (tag pgconn.CommandTag, err error) {
	if err := v.refuse(sql); err != nil {
		return tag, err
	}
	if err := v.enter(); err != nil {
		return tag, err
	}
	defer func() { v.leave(err) }()
	return v.conn.Exec(ctx, sql, args...)
}

// Query implements pgx.Tx.
func (v *messageTx) Query(ctx context.Context, sql string, args ...any) (rows pgx.Rows, err error) {
	if err := v.refuse(sql); err != nil {
		return failedRows{err}, err
	}
	if err := v.enter(); err != nil {
		return failedRows{err}, err
	}
	defer func() { v.leave(err) }()
	return v.conn.Query(ctx, sql, args...) //nolint:sqlclosecheck // the caller's
}

// QueryRow implements pgx.Tx.
func (v *messageTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, err := v.Query(ctx, sql, args...)
	if err != nil {
		return failedRows{err}
	}
	return firstRow{rows}
}

// firstRow is what pgx does in its own QueryRow.
type firstRow struct{ pgx.Rows }

func (r firstRow) Scan(dest ...any) error {
	defer r.Close()
	if !r.Next() {
		if err := r.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	if err := r.Rows.Scan(dest...); err != nil {
		return err
	}
	r.Close()
	return r.Err()
}

// CopyFrom implements pgx.Tx.
func (v *messageTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (n int64, err error) {
	if err := v.enter(); err != nil {
		return 0, err
	}
	defer func() { v.leave(err) }()
	return v.conn.CopyFrom(ctx, table, columns, src)
}

// SendBatch implements pgx.Tx.
func (v *messageTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	for _, query := range b.QueuedQueries {
		if err := v.refuse(query.SQL); err != nil {
			return pgx.FailedBatchResults(b, err)
		}
	}
	if err := v.enter(); err != nil {
		return pgx.FailedBatchResults(b, err)
	}
	defer v.leave(nil)
	return v.conn.SendBatch(ctx, b)
}

// Prepare implements pgx.Tx.
func (v *messageTx) Prepare(ctx context.Context, name, sql string) (desc *pgconn.StatementDescription, err error) {
	if err := v.refuse(sql); err != nil {
		return nil, err
	}
	if err := v.enter(); err != nil {
		return nil, err
	}
	defer func() { v.leave(err) }()
	return v.conn.Prepare(ctx, name, sql)
}

// LargeObjects is not available: pgx lets only its own transactions make them. The SQL functions
// (lo_from_bytea, lo_get, lo_put) work.
func (v *messageTx) LargeObjects() pgx.LargeObjects {
	panic("effectonce: LargeObjects is not available in a handler: use the SQL functions lo_from_bytea, lo_get and lo_put")
}

// Begin starts a savepoint.
func (v *messageTx) Begin(ctx context.Context) (pgx.Tx, error) {
	v.savepoints++
	s := &savepoint{messageTx: v, name: "effectonce_" + strconv.Itoa(v.savepoints), collected: len(v.collected)}
	if _, err := v.Exec(ctx, "SAVEPOINT "+s.name); err != nil {
		return nil, err
	}
	return s, nil
}

// errNoParent is what a handler of whole batches gets for a message without an ID.
var errNoParent = errors.New("a message published by a handler of whole batches needs an ID: derive it from its parent with msg.ChildID, or a re-execution would publish it under another")

// CollectOutbox keeps messages until the end of the batch: inserted as the last statement, they come
// after every lock that orders their keys. A message without an ID gets one that is derived from the
// message being handled and the message's place in the handler, so that a re-execution publishes it under
// the same ID. It also carries on the trace.
func (v *messageTx) CollectOutbox(o *outbox.Outbox, msgs []outbox.Message) error {
	if err := v.enter(); err != nil {
		return err
	}
	defer v.leave(nil)
	derived := make([]outbox.Message, len(msgs))
	for i, m := range msgs {
		if v.msg == nil {
			if m.ID == uuid.Nil {
				return v.misused(errNoParent)
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
	v.collected = append(v.collected, collected{o, derived})
	return nil
}

// publishID derives the ID of what is published. That of a message for later carries no time: the parent's would be
// too old for the next consumer, and DeliverAt may be another one at a re-execution.
func (m *Message) publishID(step string, later bool) uuid.UUID {
	if later {
		return dedup.MessageID("effectonce:later", append(m.ID[:len(m.ID):len(m.ID)], step...))
	}
	return m.ChildID(step)
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
	*messageTx
	name      string
	collected int
	ended     bool
}

// Commit releases the savepoint.
func (s *savepoint) Commit(ctx context.Context) error {
	if s.ended {
		return pgx.ErrTxClosed
	}
	s.ended = true
	_, err := s.Exec(ctx, "RELEASE SAVEPOINT "+s.name)
	return err
}

// Rollback goes back to the savepoint.
func (s *savepoint) Rollback(ctx context.Context) error {
	if s.ended {
		return pgx.ErrTxClosed
	}
	s.ended = true
	_, err := s.Exec(ctx, "ROLLBACK TO SAVEPOINT "+s.name)
	if err == nil {
		s.messageTx.collected = s.messageTx.collected[:s.collected]
	}
	return err
}

// failedRows carries an error to whoever reads a result that does not exist.
type failedRows struct{ err error }

func (r failedRows) Close()                                       {}
func (r failedRows) Err() error                                   { return r.err }
func (r failedRows) CommandTag() pgconn.CommandTag                { return pgconn.CommandTag{} }
func (r failedRows) FieldDescriptions() []pgconn.FieldDescription { return nil }
func (r failedRows) Next() bool                                   { return false }
func (r failedRows) Scan(...any) error                            { return r.err }
func (r failedRows) Values() ([]any, error)                       { return nil, r.err }
func (r failedRows) RawValues() [][]byte                          { return nil }
func (r failedRows) Conn() *pgx.Conn                              { return nil }
func (r failedRows) TypeMap() *pgtype.Map                         { return nil }
