package queue

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/migrations"
)

const (
	// ChunkMax bounds how many rows one transaction of Retry or Discard takes: it holds them
	// locked.
	ChunkMax = 100
	// TargetsMax bounds how many rows one call of Targets returns.
	TargetsMax = 1_000_000
)

// Limits on what is shown of a row's neighbours and actions.
const (
	nextMax    = 20
	actionsMax = 20
)

// ErrNotFound means that no row matches.
var ErrNotFound = errors.New("no row matches")

// Table is a table of rows that wait for an operator: [Dead] or [Parked]. P identifies a row, R is
// a listed row, F selects rows.
type Table[P comparable, R any, F Filter] struct {
	name     string // of the rows, in errors
	held     string // the state of a row that waits for an operator
	unstored string // the reason of a row without a payload, which cannot be retried; empty: none
	reasons  []reason
	schema   string
	sql      statements
	scan     pgx.RowToFunc[R]
	locked   pgx.RowToFunc[locked[P]]
	at       func(P) F               // selects one row, wherever it is in its queue
	into     func(*P) []any          // destinations, or arguments, of the columns of a place
	places   func([]P) []any         // arguments that identify rows
	queues   func([]locked[P]) []any // arguments that identify the queues of rows
}

// Filter is a [DeadFilter] or a [ParkedFilter].
type Filter interface {
	// args returns the filter's arguments, and more. With behind, rows behind others are selected
	// too.
	args(behind bool, more ...any) []any
}

// statements are the SQL statements of a table. Places and queues are as many arguments as its
// functions return for them.
type statements struct {
	list, targets string // filter, limit
	totals        string // filter
	detail        string // place, bytes of the payload
	next          string // place, limit
	lock          string // places
	lockQueues    string // places
	retry         string // places, subjects, who, why; returns the place and the last seq behind it
	discard       string // places, subjects, who, why, whole keys; returns the same
	promote       string // queues; its rows are the queues whose next row became the head
	// Places, last seqs, queues; returns the place, and the ID, state, reason and error of the
	// first row that remains.
	outcomes  string
	discarded string // places, since when; returns places
}

// locked is a row that is locked until the transaction ends.
type locked[P comparable] struct {
	place               P
	seq                 int64
	id                  uuid.UUID
	consumer, partition int32 // of a parked message
	topic               string
	key                 human.Key
	reason, state       string
	// subject is what operator_actions records about the row: its state, and never its payload or
	// headers.
	subject map[string]any
}

// List returns rows, the newest first. Rows behind another one are left out unless the filter's
// Behind is set: they follow their head.
func (t *Table[P, R, F]) List(ctx context.Context, db operator.Querier, filter F, limit int) ([]R, error) {
	return collect(ctx, db, t, t.scan, t.sql.list, filter.args(false, limit)...)
}

// Targets returns the places of rows, the oldest first, for Retry and Discard.
func (t *Table[P, R, F]) Targets(ctx context.Context, db operator.Querier, filter F, limit int) ([]P, error) {
	return collect(ctx, db, t, func(row pgx.CollectableRow) (place P, err error) {
		return place, row.Scan(t.into(&place)...)
	}, t.sql.targets, filter.args(false, min(limit, TargetsMax))...)
}

// Total is how many rows of a relay or consumer wait for a reason.
type Total struct {
	Of       string // the relay, or the consumer
	Reason   string
	Count    int64
	Retrying int64 // how many of Count are handed back
	HeldKeys int64 // keys whose first row has this reason
}

// Totals counts the rows that a filter selects, and those behind them.
func (t *Table[P, R, F]) Totals(ctx context.Context, db operator.Querier, filter F) ([]Total, error) {
	return collect(ctx, db, t, pgx.RowToStructByPos[Total], t.sql.totals, filter.args(true)...)
}

// show reads a row, up to payloadMax bytes of its payload and other long columns into detail, and
// the rows behind it. It returns ErrNotFound if the row does not exist.
func (t *Table[P, R, F]) show(ctx context.Context, db operator.Querier, place P, payloadMax int64, detail ...any) (row R, next []R, err error) {
	found, err := t.List(ctx, db, t.at(place), 1)
	if err == nil && len(found) == 0 {
		err = ErrNotFound
	}
	if err != nil {
		return row, nil, err
	}
	err = db.QueryRow(ctx, t.inSchema(t.sql.detail), append(t.into(&place), min(payloadMax, 1<<30))...).Scan(detail...)
	if errors.Is(err, pgx.ErrNoRows) {
		return row, nil, ErrNotFound
	}
	if err != nil {
		return row, nil, fmt.Errorf("read %s: %w", t.name, err)
	}
	next, err = collect(ctx, db, t, t.scan, t.sql.next, append(t.into(&place), nextMax)...)
	return found[0], next, err
}

func collect[T any, P comparable, R any, F Filter](ctx context.Context, db operator.Querier, t *Table[P, R, F], scan pgx.RowToFunc[T], sql string, args ...any) ([]T, error) {
	rows, err := db.Query(ctx, t.inSchema(sql), args...)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", t.name, err)
	}
	all, err := pgx.CollectRows(rows, scan)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", t.name, err)
	}
	return all, nil
}

func (t *Table[P, R, F]) inSchema(sql string) string { return migrations.InSchema(sql, t.schema) }

// keyHash stands for a key in the index, and so identifies a queue; nil: no key, and so no queue.
func keyHash(key human.Key) []byte {
	if key == nil {
		return nil
	}
	hash := sha256.Sum256(key)
	return hash[:]
}
