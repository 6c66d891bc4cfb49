// Package handlertx is the transaction that handlers of messages and of requests get, which must
// not end it. It is a separate implementation of pgx.Tx for three reasons. BEGIN and COMMIT share
// round trips with other statements, which pgx's own transaction cannot do. A handler must not end
// the transaction. And it must not be used after the handler returned, nor by two goroutines at
// once: the Gate detects that.
package handlertx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/effectonce/effectonce/internal/pgerr"
)

// Gate is called at each use.
type Gate interface {
	// Enter begins a use of the transaction, or returns why it cannot be used. Leave ends the use,
	// with its error.
	Enter() error
	Leave(err error)
	// Failed is called for a statement that failed: the handler may hide it.
	Failed(err error)
	// Statement is called for each statement, before it is sent.
	Statement(sql string)
	// Misused records a use that is forbidden to handlers, and returns it.
	Misused(err error) error
}

// Tx implements pgx.Tx.
type Tx struct {
	conn       *pgx.Conn
	gate       Gate
	savepoints *int
}

// New returns the transaction of a connection on which BEGIN was sent. savepoints counts the
// savepoints of the connection's transaction, so that several Tx of it can each create some.
func New(conn *pgx.Conn, gate Gate, savepoints *int) *Tx {
	return &Tx{conn: conn, gate: gate, savepoints: savepoints}
}

// GuardSQL opens the cursor that makes every COMMIT fail except the engine's. CloseGuardSQL closes it,
// and fails if the transaction is not the one that opened it.
const (
	GuardSQL = `-- effectonce.guard
DECLARE ` + guard + ` NO SCROLL CURSOR WITH HOLD FOR SELECT effectonce.refuse_commit()`
	CloseGuardSQL = "CLOSE " + guard

	guard = "effectonce_guard"
)

// Ended recognises the server's errors after a handler ended the transaction itself: refuse_commit
// rejects its COMMIT, and after its ROLLBACK the cursor does not exist.
func Ended(err error) bool {
	return pgerr.Is(err, pgerr.TransactionEndedByOther) || pgerr.Is(err, pgerr.UnknownCursor) && strings.Contains(err.Error(), guard)
}

var (
	_ pgx.Tx = (*Tx)(nil)
	_ pgx.Tx = (*savepoint)(nil)
)

// ErrNotYours is the error for a handler that calls Commit or Rollback.
var ErrNotYours = errors.New("the caller of the handler ends the transaction, not the handler: return nil to commit, or an error to roll back")

// Commit refuses: see ErrNotYours.
func (v *Tx) Commit(context.Context) error { return v.gate.Misused(ErrNotYours) }

// Rollback refuses: see ErrNotYours.
func (v *Tx) Rollback(context.Context) error { return v.gate.Misused(ErrNotYours) }

// Conn returns the connection of the transaction.
func (v *Tx) Conn() *pgx.Conn { return v.conn }

// ours is the prefix of the names of the library's savepoints.
const ours = "effectonce_"

// Refuse rejects statements that would end the transaction, and with it commit claims whose effects
// are not written yet. A statement that it does not detect fails at the server: see refuse_commit
// in the migrations.
func (v *Tx) Refuse(sql string) error {
	switch verb, _ := Verb(sql); verb {
	case "commit", "end", "abort", "prepare":
	case "savepoint", "release":
		if !strings.Contains(strings.ToLower(sql), ours) {
			return nil
		}
	case "rollback":
		words := strings.ToLower(sql)
		if slices.Contains(strings.Fields(words), "to") && !strings.Contains(words, ours) {
			return nil
		}
	default:
		return nil
	}
	return v.gate.Misused(ErrNotYours)
}

// Verb returns the first word of a statement in lower case, and what follows. It skips comments, with
// which generated statements begin.
func Verb(sql string) (verb, rest string) {
	for {
		sql = strings.TrimLeft(sql, " \t\r\n;(")
		var end string
		switch {
		case strings.HasPrefix(sql, "--"):
			end = "\n"
		case strings.HasPrefix(sql, "/*"):
			end = "*/"
		default:
			n := 0
			for n < len(sql) && (sql[n]|0x20 >= 'a' && sql[n]|0x20 <= 'z') {
				n++
			}
			return strings.ToLower(sql[:n]), sql[n:]
		}
		_, sql, _ = strings.Cut(sql[2:], end)
	}
}

// Exec implements pgx.Tx.
func (v *Tx) Exec(ctx context.Context, sql string, args ...any) (tag pgconn.CommandTag, err error) {
	if err := v.Refuse(sql); err != nil {
		return tag, err
	}
	return v.exec(ctx, sql, args...)
}

func (v *Tx) exec(ctx context.Context, sql string, args ...any) (tag pgconn.CommandTag, err error) {
	if err := v.gate.Enter(); err != nil {
		return tag, err
	}
	defer func() { v.leave(err) }()
	v.gate.Statement(sql)
	return v.conn.Exec(ctx, sql, args...)
}

func (v *Tx) leave(err error) {
	if err != nil {
		v.gate.Failed(err)
	}
	v.gate.Leave(err)
}

// Query implements pgx.Tx.
func (v *Tx) Query(ctx context.Context, sql string, args ...any) (rows pgx.Rows, err error) {
	if err := v.Refuse(sql); err != nil {
		return failedRows{err}, err
	}
	if err := v.gate.Enter(); err != nil {
		return failedRows{err}, err
	}
	defer func() { v.leave(err) }()
	v.gate.Statement(sql)
	rows, err = v.conn.Query(ctx, sql, args...) //nolint:sqlclosecheck // the caller's
	return watched{rows, v.gate}, err
}

// QueryRow implements pgx.Tx.
func (v *Tx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, err := v.Query(ctx, sql, args...)
	if err != nil {
		return failedRows{err}
	}
	return firstRow{rows}
}

// watched reports to the gate how a result ended.
type watched struct {
	pgx.Rows
	gate Gate
}

func (r watched) Close() {
	r.Rows.Close()
	_ = r.Err()
}

func (r watched) Err() error {
	err := r.Rows.Err()
	if err != nil {
		r.gate.Failed(err)
	}
	return err
}

// watchedBatch does the same.
type watchedBatch struct {
	pgx.BatchResults
	gate Gate
}

func (r watchedBatch) told(err error) error {
	if err != nil {
		r.gate.Failed(err)
	}
	return err
}

func (r watchedBatch) Exec() (pgconn.CommandTag, error) {
	tag, err := r.BatchResults.Exec()
	return tag, r.told(err)
}
func (r watchedBatch) Close() error { return r.told(r.BatchResults.Close()) }

// firstRow does what pgx does in its own QueryRow.
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
func (v *Tx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (n int64, err error) {
	if err := v.gate.Enter(); err != nil {
		return 0, err
	}
	defer func() { v.leave(err) }()
	return v.conn.CopyFrom(ctx, table, columns, &source{CopyFromSource: src})
}

// source keeps a panic of a handler's source from ending the process: pgx reads it in a goroutine.
type source struct {
	pgx.CopyFromSource

	err error
}

func (s *source) guard(err *error) {
	if v := recover(); v != nil {
		s.err = fmt.Errorf("the source of CopyFrom panicked: %v", v)
	}
	*err = cmp.Or(s.err, *err)
}

func (s *source) Next() (more bool) {
	defer s.guard(new(error))
	return s.CopyFromSource.Next()
}

func (s *source) Values() (values []any, err error) {
	defer s.guard(&err)
	return s.CopyFromSource.Values()
}

func (s *source) Err() (err error) {
	defer s.guard(&err)
	return s.CopyFromSource.Err()
}

// SendBatch implements pgx.Tx.
func (v *Tx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	for _, query := range b.QueuedQueries {
		if err := v.Refuse(query.SQL); err != nil {
			return pgx.FailedBatchResults(b, err)
		}
	}
	if err := v.gate.Enter(); err != nil {
		return pgx.FailedBatchResults(b, err)
	}
	defer v.gate.Leave(nil)
	for _, query := range b.QueuedQueries {
		v.gate.Statement(query.SQL)
	}
	return watchedBatch{v.conn.SendBatch(ctx, b), v.gate}
}

// Prepare implements pgx.Tx.
func (v *Tx) Prepare(ctx context.Context, name, sql string) (desc *pgconn.StatementDescription, err error) {
	if err := v.Refuse(sql); err != nil {
		return nil, err
	}
	if err := v.gate.Enter(); err != nil {
		return nil, err
	}
	defer func() { v.leave(err) }()
	return v.conn.Prepare(ctx, name, sql)
}

// LargeObjects is not available: only pgx's own transactions can create them. The SQL functions
// (lo_from_bytea, lo_get, lo_put) work.
func (v *Tx) LargeObjects() pgx.LargeObjects {
	panic("effectonce: LargeObjects is not available in a handler: use the SQL functions lo_from_bytea, lo_get and lo_put")
}

// Begin starts a savepoint.
func (v *Tx) Begin(ctx context.Context) (pgx.Tx, error) {
	*v.savepoints++
	s := &savepoint{Tx: v, name: ours + strconv.Itoa(*v.savepoints)}
	if _, err := v.exec(ctx, "SAVEPOINT "+s.name); err != nil {
		return nil, err
	}
	return s, nil
}

// savepoint is a nested transaction of a handler.
type savepoint struct {
	*Tx
	name  string
	ended bool
}

// Commit releases the savepoint.
func (s *savepoint) Commit(ctx context.Context) error {
	if s.ended {
		return pgx.ErrTxClosed
	}
	s.ended = true
	_, err := s.exec(ctx, "RELEASE SAVEPOINT "+s.name)
	return err
}

// Rollback rolls back to the savepoint.
func (s *savepoint) Rollback(ctx context.Context) error {
	if s.ended {
		return pgx.ErrTxClosed
	}
	s.ended = true
	_, err := s.exec(ctx, "ROLLBACK TO SAVEPOINT "+s.name)
	return err
}

// failedRows returns an error to the reader of a result that does not exist.
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

// Session reports whether a string of statements changes the session of the connection (role, setting,
// temporary table, lock), which must not reach the next transaction, and whether the change would outlast
// this one.
func Session(sql string) (changes, lasts bool) {
	for _, one := range Statements(sql) {
		c, l := session(one)
		changes, lasts = changes || c, lasts || l
	}
	return changes, lasts
}

func session(sql string) (changes, lasts bool) {
	switch verb, rest := Verb(sql); verb {
	case "set":
		kind, _ := Verb(rest)
		changes, lasts = true, !slices.Contains([]string{"local", "constraints", "transaction"}, kind)
	case "reset", "discard", "listen", "unlisten", "load", "deallocate":
		changes, lasts = true, true
	case "create", "declare":
		words := strings.Fields(strings.ToLower(rest))
		temporary := func(word string) bool { return word == "temp" || word == "temporary" }
		text := strings.Join(words, " ")
		changes = slices.ContainsFunc(words[:min(4, len(words))], temporary) || strings.Contains(text, " with hold ")
		lasts = changes && !strings.Contains(text, " on commit drop")
	}
	if strings.Contains(sql, "_c") || strings.Contains(sql, "_C") || strings.Contains(sql, "visory_l") || strings.Contains(sql, "VISORY_L") {
		text := strings.ReplaceAll(strings.ToLower(sql), " ", "")
		n, locks := strings.Count(text, "set_config("), strings.Contains(text, "advisory_lock")
		changes = changes || n > 0 || locks
		lasts = lasts || n > strings.Count(text, ",true)") || locks
	}
	return changes, lasts
}
