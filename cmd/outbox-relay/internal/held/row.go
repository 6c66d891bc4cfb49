package held

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
	"github.com/effectonce/effectonce/dedup"
)

// Limits on what is read at once.
const (
	// TargetsMax bounds how many rows one call of Targets returns.
	TargetsMax = 1_000_000
	nextMax    = 20 // rows behind a row that are shown
	actionsMax = 20
)

// ErrNotFound means that no row matches.
var ErrNotFound = errors.New("no row matches")

// Ref identifies a row of a kind.
type Ref struct {
	Relay string `json:"relay"` // empty: a parked message, whose seq is its own
	Seq   int64  `json:"seq"`
}

// Row is a row that waits, without columns that may be large or secret.
type Row struct {
	Ref
	ID        uuid.UUID `json:"id"`
	Consumer  string    `db:"consumer_name" json:"consumer"` // empty: a dead row
	Group     string    `json:"group"`                       // empty: a dead row
	Topic     string    `json:"topic"`
	Partition *int32    `json:"partition"` // null: a dead row
	Offset    *int64    `json:"offset"`    // null: a dead row
	Key       human.Key `json:"key"`       // text, or base64: and bytes; null: none
	Reason    string    `json:"reason"`
	State     string    `json:"state"`
	Error     string    `json:"error"`
	Attempts  int32     `json:"attempts"`
	// CreatedAt is when the row or the record was written; null: the record has no time.
	CreatedAt *time.Time `json:"created_at"`
	HeldAt    time.Time  `json:"held_at"` // dead, or parked, since then
	// AgeSeconds is the time since HeldAt, by the database's clock.
	AgeSeconds float64 `json:"age_seconds"`
	// RetryInSeconds is the time until the next attempt; null: it is not handed back, or is a dead
	// row.
	RetryInSeconds *float64 `json:"retry_in_seconds"`
	PayloadBytes   *int64   `json:"payload_bytes"` // null: a tombstone, or not stored
	Behind         int64    `json:"behind"`        // rows that wait for it
	// Head is the row for which it waits, if any.
	Head *uuid.UUID `json:"head"`

	// What identifies its queue, in locked rows only. Hash stands for the key in the index.
	ConsumerID int32  `db:"consumer" json:"-"`
	Hash       []byte `json:"-"`

	// What a Wait follows, in rows that were acted on.
	last  int64     // seq of the last row behind it
	acted time.Time // when the transaction began, by the database's clock
}

// At is the row's place for people: topic/partition/offset in Kafka, or its seq.
func (r *Row) At() string {
	if r.Partition == nil {
		return fmt.Sprintf("seq %d", r.Seq)
	}
	return topicscan.Place{Topic: r.Topic, Partition: *r.Partition, Offset: *r.Offset}.String()
}

// Filter selects rows; a nil field does not filter.
type Filter struct {
	Name                   string      // of a message, as a person knows it: Find makes it Seqs
	Seqs                   []int64     // nil: any
	IDs                    []uuid.UUID // nil: any
	Key                    human.Key
	Topic, Relay           *string
	Consumer, Group        *string // of parked messages
	Reason, State          *string
	OlderThan, YoungerThan *time.Duration // since held_at
	// Behind selects rows behind others too; they follow their head.
	Behind bool
}

// Named reports whether the filter names rows by their ID or place.
func (f *Filter) Named() bool { return f.Name != "" || f.IDs != nil || f.Seqs != nil }

// Narrows reports whether the filter selects by more than the relay.
func (f *Filter) Narrows() bool {
	return f.Named() || f.Key != nil || f.Topic != nil || f.Consumer != nil || f.Group != nil || f.Reason != nil || f.State != nil || f.OlderThan != nil || f.YoungerThan != nil
}

func (f *Filter) args(behind bool, more ...any) []any {
	return append([]any{
		f.Seqs, f.IDs, []byte(f.Key), f.Topic, f.Relay, f.Consumer, f.Group, f.Reason, f.State, f.OlderThan, f.YoungerThan, f.Behind || behind,
	}, more...)
}

// SetID makes a filter select what a person knows of a row: the id or seq of a dead row, as the
// relay's log shows them, or a text for Find.
func (k Kind) SetID(f *Filter, text string) error {
	if k != Dead {
		f.Name = text
		return nil
	}
	if id, err := uuid.Parse(text); err == nil {
		f.IDs = []uuid.UUID{id}
		return nil
	}
	seq, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return errors.New("want the row's id or its seq")
	}
	f.Seqs = []int64{seq}
	return nil
}

// Find finds the messages that a filter names: by the ID as logs show it, the ID as the message
// carried it, or topic/partition/offset. Several consumers may have parked the same message, and one
// ID may be used twice.
func (f *Filter) Find(ctx context.Context, db operator.Querier, schema string) error {
	if f.Name == "" {
		return nil
	}
	sql, args := findArgs(f.Name)
	var err error
	f.Seqs, err = operator.Rows(ctx, db, "find messages", schema, sql, pgx.RowTo[int64], args...) // none is not the same as any
	return err
}

func findArgs(text string) (sql string, args []any) {
	if place, is := topicscan.ParsePlace(text); is {
		return parkedFindAtSQL, []any{place.Topic, place.Partition, place.Offset}
	}
	return parkedFindSQL, []any{IDOf(text), text}
}

// IDOf returns the ID that a text stands for whatever its scope is; nil: it depends on the scope.
func IDOf(text string) *uuid.UUID {
	if parsed, err := uuid.Parse(text); err == nil {
		return &parsed
	}
	if carried := dedup.MessageID("", []byte(text)); carried[0]&0x80 == 0 {
		return &carried // a ULID
	}
	return nil
}

// List returns rows, the newest first.
func (k Kind) List(ctx context.Context, db operator.Querier, schema string, filter Filter, limit int) ([]Row, error) {
	return read[Row](ctx, db, k, schema, k.sql().list, filter.args(false, limit)...)
}

// Targets returns rows, the oldest first.
func (k Kind) Targets(ctx context.Context, db operator.Querier, schema string, filter Filter, limit int) ([]Ref, error) {
	return read[Ref](ctx, db, k, schema, k.sql().targets, filter.args(false, min(limit, TargetsMax))...)
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
func (k Kind) Totals(ctx context.Context, db operator.Querier, schema string, filter Filter) ([]Total, error) {
	return read[Total](ctx, db, k, schema, k.sql().totals, filter.args(true)...)
}

// Detail is everything about a row.
type Detail struct {
	Row
	TopicID    *uuid.UUID        `json:"topic_id"`    // null: unknown, or a dead row
	Headers    json.RawMessage   `json:"headers"`     // without secrets: see hide
	Payload    []byte            `json:"-"`           // at most as much as was requested
	ReleasedAt *time.Time        `json:"released_at"` // null: not tried since the last retry, or a dead row
	RetryAt    *time.Time        `json:"retry_at"`    // null: a dead row
	Next       []Row             `json:"next"`        // rows behind it, at most 20, without their Behind and Head
	Actions    []operator.Action `json:"actions"`     // of operators on this ID, the newest first, at most 20
	Advice
	Commands []string `json:"commands"` // what an operator can do, with "…" for what only a person knows
}

// Show reads a row with up to payloadMax bytes of its payload, or ErrNotFound.
func (k Kind) Show(ctx context.Context, db operator.Querier, schema string, ref Ref, payloadMax int64) (*Detail, error) {
	found, err := read[Detail](ctx, db, k, schema, k.sql().show, ref.Relay, ref.Seq, min(payloadMax, 1<<30))
	if err == nil && len(found) == 0 {
		err = ErrNotFound
	}
	if err != nil {
		return nil, err
	}
	d := &found[0]
	d.Advice, d.Commands, d.Headers = k.Advice(d.Reason), k.commands(&d.Row), hide(d.Headers)
	if d.Next, err = read[Row](ctx, db, k, schema, k.sql().next, ref.Relay, ref.Seq, nextMax); err != nil {
		return nil, err
	}
	d.Actions, err = operator.Actions(ctx, db, schema, operator.ActionFilter{Message: &d.ID}, actionsMax)
	return d, err
}

// hide replaces the values of headers that hold secrets of a client, by their names.
func hide(stored json.RawMessage) json.RawMessage {
	var headers map[string]json.RawMessage
	if json.Unmarshal(stored, &headers) != nil {
		return nil
	}
	secret := []string{"authorization", "cookie", "token", "secret", "password", "credential", "api-key", "apikey"}
	for name := range headers {
		if slices.ContainsFunc(secret, func(word string) bool { return strings.Contains(strings.ToLower(name), word) }) {
			headers[name] = json.RawMessage(`"(hidden)"`)
		}
	}
	shown, _ := json.Marshal(headers) // it was JSON
	return shown
}

func read[T any](ctx context.Context, db operator.Querier, k Kind, schema, sql string, args ...any) ([]T, error) {
	return operator.Rows(ctx, db, fmt.Sprintf("read %s %s", k, k.Words().Rows()), schema, sql, pgx.RowToStructByNameLax[T], args...)
}
