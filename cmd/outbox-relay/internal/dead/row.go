package dead

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/parked"
)

// ErrNotFound means that no dead row matches.
var ErrNotFound = errors.New("no dead row matches")

// Limits on what Show reads of columns that may be long.
const (
	nextMax    = 20
	actionsMax = 20
)

// Place identifies a row: each relay has its own dead rows.
type Place struct {
	Relay string
	Seq   int64
}

// Row is a row of outbox_dead, without columns that may be large or secret.
type Row struct {
	Relay     string     `json:"relay"`
	Seq       int64      `json:"seq"`
	ID        uuid.UUID  `json:"id"`
	Topic     string     `json:"topic"`
	Key       parked.Key `json:"key"` // text, or base64: and bytes; null: none
	Reason    string     `json:"reason"`
	State     string     `json:"state"`
	Error     string     `json:"error"`
	Attempts  int32      `json:"attempts"`
	CreatedAt time.Time  `json:"created_at"`
	DiedAt    time.Time  `json:"died_at"`
	// AgeSeconds is the time since DiedAt, by the database's clock.
	AgeSeconds   float64 `json:"age_seconds"`
	PayloadBytes *int64  `json:"payload_bytes"` // null: a tombstone
	Behind       int64   `json:"behind"`        // rows that wait for it
	// Head is the row for which it waits, if any.
	Head *uuid.UUID `json:"head"`
}

// Place returns the row's place.
func (r *Row) Place() Place { return Place{r.Relay, r.Seq} }

func scanRow(row pgx.CollectableRow) (r Row, err error) {
	var head *[16]byte
	err = row.Scan(&r.Relay, &r.Seq, (*[16]byte)(&r.ID), &r.Topic, (*[]byte)(&r.Key), &r.Reason, &r.State, &r.Error, &r.Attempts,
		&r.CreatedAt, &r.DiedAt, &r.AgeSeconds, &r.PayloadBytes, &r.Behind, &head)
	r.Head = (*uuid.UUID)(head)
	return r, err
}

// Filter selects rows; a nil field does not filter. Rows behind another one are left out unless
// Behind is set: they follow their head.
type Filter struct {
	Seqs                   []int64 // nil: any
	ID                     *uuid.UUID
	Key                    parked.Key
	Topic, Relay           *string
	Reason, State          *string
	OlderThan, YoungerThan *time.Duration // since died_at
	Behind                 bool
}

// SetID parses what a person knows of a row: its ID, or its seq, as the relay's log shows them. The
// filter then selects that row, wherever it is in its queue.
func (f *Filter) SetID(text string) error {
	f.Behind = true
	if id, err := uuid.Parse(text); err == nil {
		f.ID = &id
		return nil
	}
	seq, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return errors.New("want the row's id or its seq")
	}
	f.Seqs = []int64{seq}
	return nil
}

func (f Filter) args(more ...any) []any {
	return append([]any{f.Seqs, (*[16]byte)(f.ID), []byte(f.Key), f.Topic, f.Relay, f.Reason, f.State, f.OlderThan, f.YoungerThan, f.Behind}, more...)
}

// List returns rows, the newest first.
func List(ctx context.Context, db operator.Querier, schema string, filter Filter, limit int) ([]Row, error) {
	return collect(ctx, db, scanRow, inSchema(listSQL, schema), filter.args(limit)...)
}

// Total is how many rows of a relay are dead for a reason.
type Total struct {
	Relay    string
	Reason   string
	Count    int64
	Retrying int64 // how many of Count are handed back to the relay
	HeldKeys int64 // keys whose first row has this reason
}

// Totals counts the rows that a filter selects, and those behind them.
func Totals(ctx context.Context, db operator.Querier, schema string, filter Filter) ([]Total, error) {
	filter.Behind = true
	return collect(ctx, db, pgx.RowToStructByPos[Total], inSchema(totalsSQL, schema), filter.args()...)
}

// Targets returns the places of rows, the oldest first, for Retry and Discard.
func Targets(ctx context.Context, db operator.Querier, schema string, filter Filter, limit int) ([]Place, error) {
	return collect(ctx, db, pgx.RowToStructByPos[Place], inSchema(targetsSQL, schema), filter.args(min(limit, operator.TargetsMax))...)
}

// Detail is everything about a dead row.
type Detail struct {
	Row
	Headers json.RawMessage `json:"headers"`
	Payload []byte          `json:"-"`       // at most as much as was requested
	Next    []Row           `json:"next"`    // rows behind it, at most 20
	Actions []parked.Action `json:"actions"` // of operators on this ID, the newest first, at most 20
}

// Show reads a row with up to payloadMax bytes of its payload, or ErrNotFound.
func Show(ctx context.Context, db operator.Querier, schema string, place Place, payloadMax int64) (*Detail, error) {
	found, err := List(ctx, db, schema, Filter{Seqs: []int64{place.Seq}, Relay: &place.Relay, Behind: true}, 1)
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, ErrNotFound
	}
	d := &Detail{Row: found[0]}
	var headers string
	err = db.QueryRow(ctx, inSchema(detailSQL, schema), place.Relay, place.Seq, min(payloadMax, 1<<30)).Scan(&headers, &d.Payload)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("read dead row: %w", err)
	}
	d.Headers = json.RawMessage(headers)
	if d.Next, err = collect(ctx, db, scanRow, inSchema(nextSQL, schema), place.Relay, place.Seq, nextMax); err != nil {
		return nil, err
	}
	d.Actions, err = parked.Actions(ctx, db, schema, parked.ActionFilter{Message: &d.ID}, actionsMax)
	return d, err
}

func collect[T any](ctx context.Context, db operator.Querier, scan pgx.RowToFunc[T], sql string, args ...any) ([]T, error) {
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		return nil, fmt.Errorf("read dead rows: %w", err)
	}
	all, err := pgx.CollectRows(rows, scan)
	if err != nil {
		return nil, fmt.Errorf("read dead rows: %w", err)
	}
	return all, nil
}
