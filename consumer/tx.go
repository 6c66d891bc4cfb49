package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/effectonce/effectonce/outbox"
)

// tx is the transaction that handlers get. It is a pgx.Tx of its own, for three reasons: BEGIN shares a
// round trip with the claim and COMMIT one with the position, which pgx's own transaction cannot; a
// handler must not end it; and messages published through it are collected and inserted last.
type tx struct {
	conn    *pgx.Conn
	closed  bool
	misuse  error
	current *Message // being handled

	collected  []collected // outbox messages, in order
	savepoints int
}

// collected is what one Publish call brought.
type collected struct {
	outbox *outbox.Outbox
	msgs   []outbox.Message
}

var (
	_ pgx.Tx           = (*tx)(nil)
	_ outbox.Collector = (*tx)(nil)
	_ pgx.Tx           = (*savepoint)(nil)
	_ outbox.Collector = (*savepoint)(nil)
)

// errNotYours is what a handler gets that calls Commit or Rollback.
var errNotYours = errors.New("the consumer ends the transaction, not the handler: return nil to commit, or an error to roll back")

// errOver is what a handler gets that kept the transaction after it returned.
var errOver = fmt.Errorf("the transaction of a handler is over when the handler returns: %w", pgx.ErrTxClosed)

// Commit refuses: see errNotYours.
func (t *tx) Commit(context.Context) error { t.misuse = errNotYours; return errNotYours }

// Rollback refuses: see errNotYours.
func (t *tx) Rollback(context.Context) error { t.misuse = errNotYours; return errNotYours }

// Conn returns the connection of the transaction.
func (t *tx) Conn() *pgx.Conn { return t.conn }

// refuse keeps statements away that would end the transaction, and with it commit claims whose effects
// are still to come.
func (t *tx) refuse(sql string) error {
	if t.closed {
		return errOver
	}
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
	t.misuse = errNotYours
	return errNotYours
}

// Exec implements pgx.Tx.
func (t *tx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if err := t.refuse(sql); err != nil {
		return pgconn.CommandTag{}, err
	}
	return t.conn.Exec(ctx, sql, args...)
}

// Query implements pgx.Tx.
func (t *tx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := t.refuse(sql); err != nil {
		return failedRows{err}, err
	}
	return t.conn.Query(ctx, sql, args...)
}

// QueryRow implements pgx.Tx.
func (t *tx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if err := t.refuse(sql); err != nil {
		return failedRows{err}
	}
	return t.conn.QueryRow(ctx, sql, args...)
}

// CopyFrom implements pgx.Tx.
func (t *tx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error) {
	if t.closed {
		return 0, errOver
	}
	return t.conn.CopyFrom(ctx, table, columns, src)
}

// SendBatch implements pgx.Tx.
func (t *tx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	for _, query := range b.QueuedQueries {
		if err := t.refuse(query.SQL); err != nil {
			return pgx.FailedBatchResults(b, err)
		}
	}
	return t.conn.SendBatch(ctx, b)
}

// Prepare implements pgx.Tx.
func (t *tx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := t.refuse(sql); err != nil {
		return nil, err
	}
	return t.conn.Prepare(ctx, name, sql)
}

// LargeObjects is not available: pgx lets only its own transactions make them. The SQL functions
// (lo_from_bytea, lo_get, lo_put) work.
func (t *tx) LargeObjects() pgx.LargeObjects {
	panic("effectonce: LargeObjects is not available in a handler: use the SQL functions lo_from_bytea, lo_get and lo_put")
}

// Begin starts a savepoint.
func (t *tx) Begin(ctx context.Context) (pgx.Tx, error) {
	t.savepoints++
	s := &savepoint{tx: t, name: "effectonce_" + strconv.Itoa(t.savepoints), collected: len(t.collected)}
	if _, err := t.Exec(ctx, "SAVEPOINT "+s.name); err != nil {
		return nil, err
	}
	return s, nil
}

// CollectOutbox keeps messages until the end of the batch: inserted as the last statement, they come
// after every lock that orders their keys. A message without an ID gets one that is derived from the
// message being handled and the message's place in the handler, so that a re-execution publishes it under
// the same ID. It also carries on the trace.
func (t *tx) CollectOutbox(o *outbox.Outbox, msgs []outbox.Message) error {
	if t.closed {
		return errOver
	}
	derived := make([]outbox.Message, len(msgs))
	for i, m := range msgs {
		if m.ID == uuid.Nil {
			m.ID = t.current.ChildID("publish:" + strconv.Itoa(t.current.published))
		}
		t.current.published++
		m.Headers = withTrace(m.Headers, t.current)
		derived[i] = m
	}
	t.collected = append(t.collected, collected{o, derived})
	return nil
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
	*tx
	name      string
	collected int
	over      bool
}

// Commit releases the savepoint.
func (s *savepoint) Commit(ctx context.Context) error {
	if s.over {
		return pgx.ErrTxClosed
	}
	s.over = true
	_, err := s.conn.Exec(ctx, "RELEASE SAVEPOINT "+s.name)
	return err
}

// Rollback goes back to the savepoint.
func (s *savepoint) Rollback(ctx context.Context) error {
	if s.over {
		return pgx.ErrTxClosed
	}
	s.over = true
	_, err := s.conn.Exec(ctx, "ROLLBACK TO SAVEPOINT "+s.name)
	if err == nil {
		s.tx.collected = s.tx.collected[:s.collected]
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
