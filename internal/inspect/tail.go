package inspect

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/parked"
)

// Tail follows the outbox: every row once, when it has committed, whatever the order of commits. It remembers
// the snapshot of its last look, as the relay does.
type Tail struct {
	Schema string
	Topic  *string
	Key    parked.Key // nil: any
	// PayloadMax is how many bytes of payloads are read. 0: none.
	PayloadMax int

	snapshot, xmax string
	open           []string
	history        bool  // rows that were there at the beginning are still to be read
	last           int64 // of them: read so far
}

// TailRow is a row of the outbox as Tail shows it.
type TailRow struct {
	Seq          int64      `json:"seq"`
	ID           uuid.UUID  `json:"id"`
	Topic        string     `json:"topic"`
	Key          parked.Key `json:"key"`
	CreatedAt    time.Time  `json:"created_at"`
	PayloadBytes *int64     `json:"payload_bytes"` // null: a tombstone
	Payload      []byte     `json:"-"`
}

// historyRows is the size of a page of what was there at the beginning.
const historyRows = 1000

// Start remembers what is there already. fromBeginning lets Next return it.
func (t *Tail) Start(ctx context.Context, db Querier, fromBeginning bool) error {
	t.history = fromBeginning
	var snapshot string
	if err := db.QueryRow(ctx, snapshotSQL).Scan(&snapshot); err != nil {
		return fmt.Errorf("take a snapshot: %w", err)
	}
	t.remember(snapshot)
	return nil
}

// remember takes a snapshot apart: xmin:xmax:xip,xip.
func (t *Tail) remember(snapshot string) {
	t.snapshot = snapshot
	_, rest, _ := strings.Cut(snapshot, ":")
	xmax, open, _ := strings.Cut(rest, ":")
	t.xmax, t.open = xmax, []string{}
	if open != "" {
		t.open = strings.Split(open, ",")
	}
}

// Next calls each with rows that were not there at the last call. behind tells that there are more already. An
// error of each is returned, and what was not shown is lost for this Tail.
func (t *Tail) Next(ctx context.Context, db Querier, each func(TailRow) error) (behind bool, err error) {
	sql, args := tailSQL, []any{t.xmax, t.open, t.snapshot}
	if t.history {
		sql, args = historySQL, []any{t.last, t.snapshot, historyRows}
	}
	rows, err := db.Query(ctx, inSchema(sql, t.Schema), append([]any{t.Topic, []byte(t.Key), t.PayloadMax}, args...)...)
	if err != nil {
		return false, fmt.Errorf("read the outbox: %w", err)
	}
	var seq *int64
	var r TailRow
	var id *[16]byte
	var topic, snapshot *string
	var created *time.Time
	n := 0
	_, err = pgx.ForEachRow(rows, []any{&snapshot, &seq, &id, &topic, (*[]byte)(&r.Key), &created, &r.PayloadBytes, &r.Payload}, func() error {
		if seq == nil {
			return nil // the outer join's empty row
		}
		n++
		r.Seq, r.ID, r.Topic, r.CreatedAt = *seq, *id, *topic, *created
		t.last = r.Seq
		return each(r)
	})
	if err != nil {
		return false, fmt.Errorf("read the outbox: %w", err)
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
