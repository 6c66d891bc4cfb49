package keys

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/migrations"
)

// States of a key, as in the table. Stuck keys are running, but no worker works on them although
// they are due.
const (
	Running       = "running"
	Finished      = "finished"
	Indeterminate = "indeterminate"
	Abandoned     = "abandoned"
	Stuck         = "stuck"
)

// ErrNotFound means that no key matches.
var ErrNotFound = errors.New("no key matches")

// Place identifies a row.
type Place struct {
	Scope     string `json:"scope"`
	Operation string `json:"operation"`
	Key       string `json:"key"`
}

// ChildID returns idempotency.Key.ChildID: the idempotency key that the call of a phase, or of a
// step, was given.
func (p Place) ChildID(step string) uuid.UUID {
	return idempotency.Key{Scope: p.Scope, Operation: p.Operation, Value: p.Key}.ChildID(step)
}

// Row is a key, without its request and its answer: the columns, in their order.
type Row struct {
	Place
	// Mark is what logs show instead of the key.
	Mark  string `json:"mark"`
	State string `json:"state"`
	// Stuck: it is running, no worker has its lock, and it is overdue.
	Stuck bool `json:"stuck"`
	// The flow that claimed it; null: work in one transaction
	Flow   *string  `json:"flow"`
	Phases []string `json:"phases"` // completed phases, in order
	// Phase whose foreign call may have been made, or was: see Call
	Calling *string `json:"calling"`
	// What is known of that call: "repeatable", "once" or "happened", as in the table; empty: there is none
	Call string `json:"call"`
	// Locked: a worker holds it until LockedUntil. LockedBy is the last worker.
	Locked       bool       `json:"locked"`
	LockedBy     *string    `json:"locked_by"`
	LockedUntil  *time.Time `json:"locked_until"`
	LockToken    int64      `json:"lock_token"`
	Attempts     int32      `json:"attempts"`
	Error        *string    `json:"error"`
	RetryAt      *time.Time `json:"retry_at"`
	Status       *int32     `json:"status"`
	BodyDropped  bool       `json:"body_dropped"` // it was too large to be stored
	Sealed       bool       `json:"sealed"`
	RequestBytes *int64     `json:"request_bytes"`
	DataBytes    *int64     `json:"data_bytes"`
	BodyBytes    *int64     `json:"body_bytes"`
	CreatedAt    time.Time  `json:"created_at"`
	AgeSeconds   float64    `json:"age_seconds"` // since CreatedAt, by the database's clock
	FinishedAt   *time.Time `json:"finished_at"`
	ExpiresAt    *time.Time `json:"expires_at"`
}

// OnItsWay reports whether the call in doubt may not have reached the foreign system yet.
func (r Row) OnItsWay() bool {
	now := r.CreatedAt.Add(time.Duration(r.AgeSeconds * float64(time.Second)))
	return r.State == Indeterminate && r.RetryAt != nil && r.RetryAt.After(now)
}

// InDoubt reports whether a person has to find out if the foreign system acted, before its call is made
// again.
func (r Row) InDoubt() bool {
	return r.Call == "once" || r.Call == "repeatable" && r.State == Indeterminate
}

// Filter selects keys; a nil field does not filter.
type Filter struct {
	// States to list, or Stuck alone. Default: all that are not finished.
	States           []string
	Scope, Operation *string
	OlderThan        *time.Duration // since created_at
}

func (f Filter) args(limit int) []any {
	states, stuck := f.States, false
	switch {
	case len(states) == 0:
		states = []string{Running, Indeterminate, Abandoned}
	case len(states) == 1 && states[0] == Stuck:
		states, stuck = []string{Running}, true
	}
	return []any{states, stuck, f.Scope, f.Operation, f.OlderThan, limit}
}

// List returns keys, the newest first.
func List(ctx context.Context, db operator.Querier, schema string, filter Filter, limit int) ([]Row, error) {
	return read(ctx, db, schema, listSQL, filter.args(limit)...)
}

// Name is what a person knows of a key. Nil: any.
type Name struct {
	Scope, Operation *string
	Key              string // its value, or, if it is not finished, its mark as logs show it
}

const findMax = 100

// Find returns the keys of a name, the newest first, at most 100. Without scope and operation it
// reads the whole table.
func Find(ctx context.Context, db operator.Querier, schema string, name Name) ([]Row, error) {
	return read(ctx, db, schema, findSQL, name.Key, name.Scope, name.Operation, findMax)
}

func read(ctx context.Context, db operator.Querier, schema, sql string, args ...any) ([]Row, error) {
	return operator.Rows(ctx, db, "read idempotency keys", schema, sql, pgx.RowToStructByPos[Row], args...)
}

// actionsMax bounds how many actions Show reads.
const actionsMax = 20

// Detail is everything about a key.
type Detail struct {
	Row
	Fingerprint string          `json:"fingerprint"` // SHA-256; all zeros: not compared
	Headers     json.RawMessage `json:"headers"`
	// The request, what phases pass on, and the answer: at most as many bytes as were requested,
	// and nothing that is encrypted.
	Request []byte            `json:"-"`
	Data    []byte            `json:"-"`
	Body    []byte            `json:"-"`
	Actions []operator.Action `json:"actions"` // of operators on this key, the newest first, at most 20
}

// Show reads a key with up to payloadMax bytes of each of its texts, or ErrNotFound.
func Show(ctx context.Context, db operator.Querier, schema string, row Row, payloadMax int64) (*Detail, error) {
	d := &Detail{Row: row}
	var headers string
	err := db.QueryRow(ctx, migrations.InSchema(detailSQL, schema), row.Scope, row.Operation, row.Key, min(payloadMax, 1<<30)).
		Scan(&d.Fingerprint, &headers, &d.Request, &d.Data, &d.Body)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("read idempotency key: %w", err)
	}
	d.Headers = json.RawMessage(headers)
	d.Actions, err = Actions(ctx, db, schema, row.Place, actionsMax)
	return d, err
}

// Actions returns what operators did to a key, the newest first, even if the key is deleted.
func Actions(ctx context.Context, db operator.Querier, schema string, place Place, limit int) ([]operator.Action, error) {
	return operator.ReadActions(ctx, db, schema, actionsSQL, place.Scope, place.Operation, place.Key, limit)
}
