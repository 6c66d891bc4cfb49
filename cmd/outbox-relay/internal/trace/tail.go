package trace

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// Tail follows the outbox: it returns every row once, after its commit, whatever the order of
// commits. It keeps the snapshot of its last read, as the relay does.
type Tail struct {
	Schema string
	Topic  *string
	Key    human.Key // nil: any
	// PayloadMax is how many bytes of payloads are read. 0: none.
	PayloadMax int

	snapshot, xmax string
	open           []string
	history        bool  // rows that existed at the beginning are not all read
	last           int64 // seq of the last of them that was read
}

// TailRow is a row of the outbox as Tail shows it.
type TailRow struct {
	Seq          int64     `json:"seq"`
	ID           uuid.UUID `json:"id"`
	Topic        string    `json:"topic"`
	Key          human.Key `json:"key"`
	CreatedAt    time.Time `json:"created_at"`
	PayloadBytes *int64    `json:"payload_bytes"` // null: a tombstone
	Payload      []byte    `json:"-"`
}

// historyRows is the page size for rows that existed at the beginning.
const historyRows = 1000

// Start records what exists already. With fromBeginning, Next returns that as well.
func (t *Tail) Start(ctx context.Context, db operator.Querier, fromBeginning bool) error {
	t.history = fromBeginning
	var snapshot string
	if err := db.QueryRow(ctx, snapshotSQL).Scan(&snapshot); err != nil {
		return fmt.Errorf("take a snapshot: %w", err)
	}
	t.remember(snapshot)
	return nil
}

// remember parses a snapshot: xmin:xmax:xip,xip.
func (t *Tail) remember(snapshot string) {
	t.snapshot = snapshot
	_, rest, _ := strings.Cut(snapshot, ":")
	xmax, open, _ := strings.Cut(rest, ":")
	t.xmax, t.open = xmax, []string{}
	if open != "" {
		t.open = strings.Split(open, ",")
	}
}

// Next calls each for the rows that appeared since the last call. behind reports whether more are
// available already. Next returns an error of each; rows that were not shown then are lost for this
// Tail.
func (t *Tail) Next(ctx context.Context, db operator.Querier, each func(TailRow) error) (behind bool, err error) {
	sql, args := tailSQL, []any{t.xmax, t.open, t.snapshot}
	if t.history {
		sql, args = historySQL, []any{t.last, t.snapshot, historyRows}
	}
	var seq *int64
	var r TailRow
	var id *[16]byte
	var topic, snapshot *string
	var created *time.Time
	n := 0
	into := []any{&snapshot, &seq, &id, &topic, (*[]byte)(&r.Key), &created, &r.PayloadBytes, &r.Payload}
	err = operator.Each(ctx, db, "read the outbox", t.Schema, sql, append([]any{t.Topic, []byte(t.Key), t.PayloadMax}, args...), into, func() error {
		if seq == nil {
			return nil // the outer join's empty row
		}
		n++
		r.Seq, r.ID, r.Topic, r.CreatedAt = *seq, *id, *topic, *created
		t.last = r.Seq
		return each(r)
	})
	if err != nil {
		return false, err
	}
	if t.history {
		t.history = n == historyRows
		return true, nil
	}
	if snapshot != nil {
		t.remember(*snapshot)
	}
	return false, nil
}
