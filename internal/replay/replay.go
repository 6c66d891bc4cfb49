// Package replay publishes rows again that a relay has published and that are still in the outbox. It reads by itself:
// the relay, its progress and its leases are not touched.
package replay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/inspect"
	"github.com/effectonce/effectonce/internal/operator"
	"github.com/effectonce/effectonce/internal/partitions"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// What is in memory, with the brokers and read by one statement: at most so many rows, and no further row where they have
// so many bytes.
const (
	pageRowsMax  = 500
	pageBytesMax = 32 << 20
)

// Options say what is published again.
type Options struct {
	Schema, Relay string
	From, To      Bound
	Topic         *string // nil: all
	ToTopic       *string // where to; nil: as Routes say
	Routes        relay.Routes
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
	Dropped   int64 `json:"dropped"` // by a rule of Routes
	DryRun    bool  `json:"dry_run"`
}

// DB is a connection or a pool.
type DB interface {
	inspect.Querier
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Run publishes the chosen rows in the order of seq, under their IDs, and notes who did it. It ends at the first row that
// Kafka does not take, and sends no later row of its key. An error leaves what was published; it is safe to run
// again, since consumers know the IDs. kafka leads to the brokers; a dry run needs none.
//
// Rows may leave the outbox meanwhile: then Published and Dropped are less than Rows.
func Run(ctx context.Context, db DB, kafka []kgo.Opt, opts Options) (*Report, error) {
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
	return report, report.publish(ctx, db, kafka, in(pageSQL), args, opts)
}

func (r *Report) publish(ctx context.Context, db DB, kafka []kgo.Opt, sql string, args []any, opts Options) error {
	router, err := opts.Routes.Router()
	if err != nil {
		return fmt.Errorf("routes: %w", err)
	}
	sender, err := newSender(kafka)
	if err != nil {
		return err
	}
	defer sender.client.Close()
	limit := pageRowsMax
	for after := int64(0); ; {
		rows, err := page(ctx, db, sql, append(args[:len(args):len(args)], after, limit), place{router, opts.ToTopic})
		if err != nil || len(rows) == 0 {
			return err
		}
		last, read := rows[len(rows)-1].seq, len(rows)
		rows = slices.DeleteFunc(rows, func(r row) bool { return r.record == nil })
		r.Dropped += int64(read - len(rows))
		published, err := sender.send(ctx, rows)
		r.Published += published
		if err != nil {
			return err
		}
		if opts.Progress != nil {
			opts.Progress(r.Published)
		}
		after = last
		limit = min(2*read, pageRowsMax) // what the next page would drop is read for nothing
	}
}

// place is where rows go.
type place struct {
	router  *relay.Router
	toTopic *string
}

// page reads the rows behind a seq, at least one if there is any.
func page(ctx context.Context, db DB, sql string, args []any, to place) ([]row, error) {
	result, err := db.Query(ctx, sql, args...)
	if err != nil {
		return nil, fmt.Errorf("read outbox: %w", err)
	}
	defer result.Close()
	var rows []row
	for bytes := 0; bytes <= pageBytesMax && result.Next(); {
		r, err := scan(result, to)
		if err != nil {
			return nil, err
		}
		rows = append(rows, r)
		bytes += r.bytes
	}
	result.Close()
	if err := result.Err(); err != nil {
		return nil, fmt.Errorf("read outbox: %w", err)
	}
	return rows, nil
}

// scan returns a row without a record where a rule drops it.
func scan(result pgx.Rows, to place) (r row, err error) {
	var topic, headers string
	var key, payload []byte
	var created time.Time
	if err := result.Scan(&r.seq, (*[16]byte)(&r.id), &topic, &key, &payload, &headers, &created); err != nil {
		return r, fmt.Errorf("read outbox: %w", err)
	}
	own, err := outbox.DecodeHeaders([]byte(headers))
	if err != nil {
		// It may have been mended among the dead rows: the outbox keeps it as it was written.
		return r, fmt.Errorf("row %d (id %s) cannot be published as it stands in the outbox: end the replay before this row and go on behind it: %w", r.seq, r.id, err)
	}
	topic, dropped := to.router.Topic(topic, own)
	if dropped && to.toTopic == nil {
		return r, nil
	}
	own, partition, err := partitions.Take(own)
	if err != nil {
		return r, fmt.Errorf("row %d (id %s) cannot be published as it stands in the outbox: end the replay before this row and go on behind it: %w", r.seq, r.id, err)
	}
	if to.toTopic != nil { // it may have fewer
		topic, partition = *to.toTopic, nil
	}
	r.bytes = (&outbox.Message{Key: key, Payload: payload, Headers: own}).RecordBytes()
	r.record = &kgo.Record{Topic: topic, Key: key, Value: payload, Headers: []kgo.RecordHeader{
		{Key: outbox.HeaderMessageID, Value: []byte(r.id.String())},
		{Key: outbox.HeaderOccurredAt, Value: []byte(created.UTC().Format("2006-01-02T15:04:05.000000Z"))},
	}}
	if partition != nil {
		partitions.Set(r.record, *partition)
	}
	for _, h := range own {
		if h.Name != outbox.HeaderMessageID && h.Name != outbox.HeaderOccurredAt {
			r.record.Headers = append(r.record.Headers, kgo.RecordHeader{Key: h.Name, Value: h.Value})
		}
	}
	return r, nil
}
