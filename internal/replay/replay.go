// Package replay publishes rows again that a relay has published and that are still in the outbox. It reads by itself:
// the relay, its progress and its leases are not touched.
package replay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/inspect"
	"github.com/effectonce/effectonce/internal/operator"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/outbox"
)

// pageRowsMax bounds what is in memory, with the brokers and read by one statement.
const pageRowsMax = 500

// Options say what is published again.
type Options struct {
	Schema, Relay string
	From, To      Bound
	Topic         *string // nil: all
	ToTopic       *string // where to; nil: the row's own
	DryRun        bool
	By            operator.By
	// Progress is told how many rows are published. Optional.
	Progress func(rows int64)
}

// Bound is a time of created_at, or a tick: what was committed before it is visible in its snapshot. From is inclusive,
// To is not. The zero value is none.
type Bound struct {
	Time time.Time
	Tick int64
}

// IsZero tells whether there is no bound.
func (b Bound) IsZero() bool { return b == Bound{} }

// MarshalJSON writes the time or the tick.
func (b Bound) MarshalJSON() ([]byte, error) {
	switch {
	case b.Tick != 0:
		return json.Marshal(b.Tick)
	case b.Time.IsZero():
		return []byte("null"), nil
	}
	return json.Marshal(b.Time)
}

// args are the time, or the snapshot, as the statements take them.
func (b Bound) args(ctx context.Context, db DB, sql string) (at *time.Time, snapshot *string, err error) {
	switch {
	case b.Tick != 0:
		err = db.QueryRow(ctx, sql, b.Tick).Scan(&snapshot)
		if errors.Is(err, pgx.ErrNoRows) {
			err = fmt.Errorf("tick %d is not there: it is forgotten ten minutes after relays have moved on, unless one stands on it (outbox-relay positions): give a time", b.Tick)
		}
	case !b.Time.IsZero():
		at = &b.Time
	}
	return at, snapshot, err
}

// Report says what was done.
type Report struct {
	Rows      int64 `json:"rows"` // that were there to publish
	Published int64 `json:"published"`
	DryRun    bool  `json:"dry_run"`
}

// DB is a connection or a pool.
type DB interface {
	inspect.Querier
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Run publishes the chosen rows in the order of seq, under their IDs, and notes who did it. An error leaves what was
// published; it is safe to run again, since consumers know the IDs. client is nil for a dry run.
//
// Rows may leave the outbox meanwhile: then Published is less than Rows.
func Run(ctx context.Context, db DB, client *kgo.Client, opts Options) (*Report, error) {
	in := func(sql string) string { return migrations.InSchema(sql, opts.Schema) }
	report := &Report{DryRun: opts.DryRun}
	cut, err := inspect.ReadCut(ctx, db, opts.Schema, opts.Relay)
	if err != nil {
		return report, err
	}
	var last int64
	if err := db.QueryRow(ctx, in(lastSQL)).Scan(&last); err != nil {
		return report, fmt.Errorf("read the end of the outbox: %w", err)
	}
	from, since, err := opts.From.args(ctx, db, in(tickSQL))
	if err != nil {
		return report, fmt.Errorf("begin of the replay: %w", err)
	}
	to, until, err := opts.To.args(ctx, db, in(tickSQL))
	if err != nil {
		return report, fmt.Errorf("end of the replay: %w", err)
	}
	args := cut.Args(from, to, opts.Topic, opts.Relay, last, since, until)
	if err := db.QueryRow(ctx, in(countSQL), args...).Scan(&report.Rows); err != nil {
		return report, fmt.Errorf("count rows: %w", err)
	}
	if opts.DryRun || report.Rows == 0 {
		return report, nil
	}
	subject, err := json.Marshal(map[string]any{"relay": opts.Relay, "from": opts.From, "to": opts.To, "topic": opts.Topic, "to_topic": opts.ToTopic, "rows": report.Rows})
	if err != nil {
		return report, err
	}
	if _, err := db.Exec(ctx, in(noteSQL), opts.By.Who, opts.By.Why, string(subject)); err != nil {
		return report, fmt.Errorf("note the replay: %w", err)
	}
	for after := int64(0); ; {
		records, end, err := page(ctx, db, in(pageSQL), append(args[:len(args):len(args)], after, pageRowsMax), opts.ToTopic)
		if err != nil || len(records) == 0 {
			return report, err
		}
		for _, result := range client.ProduceSync(ctx, records...) {
			if result.Err != nil {
				err = fmt.Errorf("publish to topic %s: %w", result.Record.Topic, result.Err)
				continue
			}
			report.Published++
		}
		if err != nil {
			return report, err
		}
		if opts.Progress != nil {
			opts.Progress(report.Published)
		}
		after = end
	}
}

// page reads the rows behind a seq as records, and the seq of the last.
func page(ctx context.Context, db DB, sql string, args []any, toTopic *string) (records []*kgo.Record, end int64, err error) {
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		return nil, 0, fmt.Errorf("read outbox: %w", err)
	}
	var id [16]byte
	var topic, headers string
	var key, payload []byte
	var created time.Time
	_, err = pgx.ForEachRow(rows, []any{&end, &id, &topic, &key, &payload, &headers, &created}, func() error {
		own, err := outbox.DecodeHeaders([]byte(headers))
		if err != nil {
			return fmt.Errorf("row %d: %w", end, err)
		}
		record := &kgo.Record{Topic: topic, Key: key, Value: payload, Headers: []kgo.RecordHeader{
			{Key: outbox.HeaderMessageID, Value: []byte(uuid.UUID(id).String())},
			{Key: outbox.HeaderOccurredAt, Value: []byte(created.UTC().Format("2006-01-02T15:04:05.000000Z"))},
		}}
		if toTopic != nil {
			record.Topic = *toTopic
		}
		for _, h := range own {
			if h.Name != outbox.HeaderMessageID && h.Name != outbox.HeaderOccurredAt {
				record.Headers = append(record.Headers, kgo.RecordHeader{Key: h.Name, Value: h.Value})
			}
		}
		records = append(records, record)
		return nil
	})
	if err != nil {
		return nil, 0, fmt.Errorf("read outbox: %w", err)
	}
	return records, end, nil
}
