package queue

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// DeadPlace identifies a dead row: each relay has its own dead rows.
type DeadPlace struct {
	Relay string
	Seq   int64
}

// DeadRow is a row of outbox_dead, without columns that may be large or secret.
type DeadRow struct {
	Relay     string    `json:"relay"`
	Seq       int64     `json:"seq"`
	ID        uuid.UUID `json:"id"`
	Topic     string    `json:"topic"`
	Key       human.Key `json:"key"` // text, or base64: and bytes; null: none
	Reason    string    `json:"reason"`
	State     string    `json:"state"`
	Error     string    `json:"error"`
	Attempts  int32     `json:"attempts"`
	CreatedAt time.Time `json:"created_at"`
	DiedAt    time.Time `json:"died_at"`
	// AgeSeconds is the time since DiedAt, by the database's clock.
	AgeSeconds   float64 `json:"age_seconds"`
	PayloadBytes *int64  `json:"payload_bytes"` // null: a tombstone
	Behind       int64   `json:"behind"`        // rows that wait for it
	// Head is the row for which it waits, if any.
	Head *uuid.UUID `json:"head"`
}

// Place returns the row's place.
func (r *DeadRow) Place() DeadPlace { return DeadPlace{r.Relay, r.Seq} }

func scanDead(row pgx.CollectableRow) (r DeadRow, err error) {
	var head *[16]byte
	err = row.Scan(&r.Relay, &r.Seq, (*[16]byte)(&r.ID), &r.Topic, (*[]byte)(&r.Key), &r.Reason, &r.State, &r.Error, &r.Attempts,
		&r.CreatedAt, &r.DiedAt, &r.AgeSeconds, &r.PayloadBytes, &r.Behind, &head)
	r.Head = (*uuid.UUID)(head)
	return r, err
}

// DeadFilter selects dead rows; a nil field does not filter.
type DeadFilter struct {
	Seqs                   []int64 // nil: any
	ID                     *uuid.UUID
	Key                    human.Key
	Topic, Relay           *string
	Reason, State          *string
	OlderThan, YoungerThan *time.Duration // since died_at
	Behind                 bool
}

// SetID parses what a person knows of a row: its ID, or its seq, as the relay's log shows them. The
// filter then selects that row, wherever it is in its queue.
func (f *DeadFilter) SetID(text string) error {
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

func (f DeadFilter) args(behind bool, more ...any) []any {
	return append([]any{f.Seqs, (*[16]byte)(f.ID), []byte(f.Key), f.Topic, f.Relay, f.Reason, f.State, f.OlderThan, f.YoungerThan, f.Behind || behind}, more...)
}

// DeadTable is the table of dead rows.
type DeadTable = Table[DeadPlace, DeadRow, DeadFilter]

// Dead is outbox_dead.
func Dead(schema string) *DeadTable {
	return &DeadTable{
		name: "dead rows", held: "held", reasons: deadReasons(), schema: schema,
		sql: statements{
			list: deadListSQL, targets: deadTargetsSQL, totals: deadTotalsSQL, detail: deadDetailSQL, next: deadNextSQL,
			lock: deadLockSQL, lockQueues: deadLockQueuesSQL, retry: deadRetrySQL, discard: deadDiscardSQL, promote: deadPromoteSQL,
			outcomes: deadOutcomesSQL, discarded: deadDiscardedSQL,
		},
		scan: scanDead, locked: scanLockedDead,
		at:   func(p DeadPlace) DeadFilter { return DeadFilter{Seqs: []int64{p.Seq}, Relay: &p.Relay, Behind: true} },
		into: func(p *DeadPlace) []any { return []any{&p.Relay, &p.Seq} },
		places: func(places []DeadPlace) []any {
			relays, seqs := make([]string, len(places)), make([]int64, len(places))
			for i, p := range places {
				relays[i], seqs[i] = p.Relay, p.Seq
			}
			return []any{relays, seqs}
		},
		queues: func(rows []locked[DeadPlace]) []any {
			relays, topics, hashes := make([]string, len(rows)), make([]string, len(rows)), make([][]byte, len(rows))
			for i, r := range rows {
				relays[i], topics[i], hashes[i] = r.place.Relay, r.topic, keyHash(r.key)
			}
			return []any{relays, topics, hashes}
		},
	}
}

// DeadStates returns all states that the schema knows.
func DeadStates() []string { return []string{"held", "behind", "retry"} }

// DeadDetail is everything about a dead row.
type DeadDetail struct {
	DeadRow
	Headers json.RawMessage   `json:"headers"`
	Payload []byte            `json:"-"`       // at most as much as was requested
	Next    []DeadRow         `json:"next"`    // rows behind it, at most 20
	Actions []operator.Action `json:"actions"` // of operators on this ID, the newest first, at most 20
}

// ShowDead reads a row with up to payloadMax bytes of its payload, or ErrNotFound.
func ShowDead(ctx context.Context, db operator.Querier, schema string, place DeadPlace, payloadMax int64) (d *DeadDetail, err error) {
	d = &DeadDetail{}
	d.DeadRow, d.Next, err = Dead(schema).show(ctx, db, place, payloadMax, (*[]byte)(&d.Headers), &d.Payload)
	if err == nil {
		d.Actions, err = operator.Actions(ctx, db, schema, operator.ActionFilter{Message: &d.ID}, actionsMax)
	}
	return d, err
}

func scanLockedDead(row pgx.CollectableRow) (r locked[DeadPlace], err error) {
	var text string
	var attempts int32
	var created time.Time
	err = row.Scan(&r.place.Relay, &r.place.Seq, (*[16]byte)(&r.id), &r.topic, (*[]byte)(&r.key), &r.reason, &text, &attempts, &r.state, &created)
	r.seq = r.place.Seq
	r.subject = map[string]any{
		"relay": r.place.Relay, "seq": r.place.Seq, "message_id": r.id, "topic": r.topic, "key": r.key,
		"reason": r.reason, "error": text, "attempts": attempts, "state": r.state, "created_at": created,
	}
	return r, err
}
