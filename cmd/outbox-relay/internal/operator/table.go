package operator

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/migrations"
)

const (
	// ChunkMax bounds how many rows one transaction of Retry or Discard takes: it holds them
	// locked.
	ChunkMax = 100
	// TargetsMax bounds how many rows one query of a table returns.
	TargetsMax = 1_000_000
)

// By is who acts, and why. Both are stored forever, unchanged: Who has 1 to 255 bytes, Why 1 to
// 2048.
type By struct{ Who, Why string }

// Beginner is a connection or a pool.
type Beginner interface {
	BeginTx(ctx context.Context, opts pgx.TxOptions) (pgx.Tx, error)
}

// Querier is a connection, a pool or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// ErrBusy means that a program, or another operator, has worked on one of the rows for longer than
// 30 s. The call that returns it changed nothing and can be repeated.
var ErrBusy = errors.New("another program or operator works on them: try again")

// Row is a row that is locked until the transaction ends.
type Row[P comparable] interface {
	// Place identifies the row in its table.
	Place() P
	// Subject is what operator_actions records about the row: its state, and never its payload or
	// headers.
	Subject() map[string]any
}

// Table describes how the rows of a table are acted on. P identifies a row.
type Table[P comparable, R Row[P]] struct {
	Name   string // of the rows, in errors
	Held   string // the state of a row that waits for an operator
	Schema string
	SQL    Statements
	Scan   pgx.RowToFunc[R]
	Into   func(*P) []any  // destinations for the columns of a place
	Places func([]P) []any // arguments that identify rows
	Queues func([]R) []any // arguments that identify the queues of rows
}

// Statements are the SQL statements of a table. Places and queues are as many arguments as its
// functions return for them.
type Statements struct {
	Lock       string // places
	LockQueues string // places
	Retry      string // places, subjects, who, why; returns the place and the last seq behind it
	Discard    string // places, subjects, who, why, whole keys; returns the same
	Promote    string // queues; its rows are the queues whose next row became the head
	// Places, last seqs, queues; returns the place, and the ID, state, reason and error of the
	// first row that remains.
	Outcomes  string
	Discarded string // places, since when; returns places
}

func (t *Table[P, R]) inSchema(sql string) string { return migrations.InSchema(sql, t.Schema) }

func (t *Table[P, R]) lockRows(ctx context.Context, tx pgx.Tx, sql string, places []P) ([]R, error) {
	rows, err := tx.Query(ctx, t.inSchema(sql), t.Places(places)...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, t.Scan)
}

// change runs SQL.Retry or SQL.Discard on locked rows.
func (t *Table[P, R]) change(ctx context.Context, tx pgx.Tx, sql string, locked []R, more ...any) ([]Done[P, R], error) {
	places, subjects := make([]P, len(locked)), make([]string, len(locked))
	for i, r := range locked {
		text, err := json.Marshal(r.Subject())
		if err != nil {
			return nil, err
		}
		places[i], subjects[i] = r.Place(), string(text)
	}
	rows, err := tx.Query(ctx, t.inSchema(sql), append(append(t.Places(places), subjects), more...)...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (d Done[P, R], err error) {
		return d, row.Scan(append(t.Into(&d.place), &d.last)...)
	})
}
