// Package replay publishes rows again that a relay has published and that are still in the outbox.
// It does not touch the relay, its progress or its leases.
package replay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/inspect"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/internal/record"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/outbox"
)

// Limits on what is in memory, sent to the brokers and read by one statement: a number of rows, and
// a number of bytes after which no further row is added.
const (
	pageRowsMax  = 500
	pageBytesMax = 32 << 20
)

// Options select what is published again.
type Options struct {
	Schema, Relay string
	From, To      Bound
	Topic         *string // nil: all
	ToTopic       *string // destination; nil: TopicPrefix and the row's topic
	TopicPrefix   string
	DryRun        bool
	By            operator.By
	// Progress is called with the number of published rows. Optional.
	Progress func(rows int64)
}

// Bound is a time of created_at, or a tick, which bounds by what was committed before it and so is
// visible in its snapshot. From is inclusive, To is not. The zero value is no bound.
type Bound struct {
	Time time.Time
	Tick int64
}

// IsZero reports whether there is no bound.
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

// args returns the time, or the snapshot, as the statements take them.
func (b Bound) args(ctx context.Context, db DB, sql string) (at *time.Time, snapshot *string, err error) {
	switch {
	case b.Tick != 0:
		err = db.QueryRow(ctx, sql, b.Tick).Scan(&snapshot)
		if errors.Is(err, pgx.ErrNoRows) {
			err = fmt.Errorf("there is no tick %d: ticks are deleted ten minutes after relays have passed them, unless a relay is at one (outbox-relay positions): use a time", b.Tick)
		}
	case !b.Time.IsZero():
		at = &b.Time
	}
	return at, snapshot, err
}

// Report is what was done.
type Report struct {
	Rows      int64 `json:"rows"` // that could be published
	Published int64 `json:"published"`
	DryRun    bool  `json:"dry_run"`
}

// DB is a connection or a pool.
type DB interface {
	operator.Querier
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Run publishes the chosen rows in the order of seq, under their IDs, and records who did so. It
// stops at the first row that Kafka does not accept, and sends no later row of its key. After an
// error, what was published stays published; it is safe to run it again, since consumers recognise
// the IDs. kafka has the options to reach the brokers; a dry run needs none.
//
// Rows may leave the outbox during the run: then Published is less than Rows.
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
	sender, err := newSender(kafka)
	if err != nil {
		return report, err
	}
	defer sender.client.Close()
	if opts.ToTopic != nil { // before the replay is recorded
		if err := sender.exists(ctx, *opts.ToTopic); err != nil {
			return report, err
		}
	}
	subject, err := json.Marshal(map[string]any{"relay": opts.Relay, "from": opts.From, "to": opts.To, "topic": opts.Topic, "to_topic": opts.ToTopic, "rows": report.Rows})
	if err != nil {
		return report, err
	}
	if _, err := db.Exec(ctx, in(noteSQL), opts.By.Who, opts.By.Why, string(subject)); err != nil {
		return report, fmt.Errorf("record the replay: %w", err)
	}
	return report, report.publish(ctx, db, sender, in(pageSQL), args, place{prefix: opts.TopicPrefix, toTopic: opts.ToTopic}, opts.Progress)
}

func (r *Report) publish(ctx context.Context, db DB, sender *sender, sql string, args []any, to place, progress func(rows int64)) error {
	limit := pageRowsMax
	for after := int64(0); ; {
		to.maker = record.NewMaker(limit)
		rows, err := page(ctx, db, sql, append(args[:len(args):len(args)], after, limit), to)
		if err != nil || len(rows) == 0 {
			return err
		}
		published, err := sender.send(ctx, rows)
		r.Published += published
		if err != nil {
			return err
		}
		if progress != nil {
			progress(r.Published)
		}
		after = rows[len(rows)-1].seq
		// Reading more would be wasted: the next page would drop it
		limit = min(2*len(rows), pageRowsMax)
	}
}

// place is the destination of rows.
type place struct {
	prefix  string
	toTopic *string
	maker   *record.Maker
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

func scan(result pgx.Rows, to place) (r row, err error) {
	var topic, headers string
	var key, payload []byte
	var created time.Time
	if err := result.Scan(&r.seq, (*[16]byte)(&r.id), &topic, &key, &payload, &headers, &created); err != nil {
		return r, fmt.Errorf("read outbox: %w", err)
	}
	own, err := outbox.DecodeHeaders([]byte(headers))
	if err != nil {
		// It may have been fixed in outbox_dead: the outbox keeps the row as it was written.
		return r, fmt.Errorf("row %d (id %s) cannot be published as it is in the outbox: end the replay before this row and continue behind it: %w", r.seq, r.id, err)
	}
	own, partition, err := record.TakePartition(own)
	if err != nil {
		return r, fmt.Errorf("row %d (id %s) cannot be published as it is in the outbox: end the replay before this row and continue behind it: %w", r.seq, r.id, err)
	}
	topic = to.prefix + topic
	if to.toTopic != nil { // it may have fewer
		topic, partition = *to.toTopic, nil
	}
	r.bytes = (&outbox.Message{Key: key, Payload: payload, Headers: own}).RecordBytes()
	r.record = record.Make(to.maker, record.Row{ID: r.id, Topic: topic, Key: key, Payload: payload, CreatedAt: created}, own)
	if partition != nil {
		record.SetPartition(r.record, *partition)
	}
	return r, nil
}
