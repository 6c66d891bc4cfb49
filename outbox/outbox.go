package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/migrations"
)

// RecordBytesMaxDefault is below Kafka's default message.max.bytes of 1,048,588, to leave room.
const RecordBytesMaxDefault = 1_000_000

// Config of an Outbox. The zero value works.
type Config struct {
	// Schema that holds the table. Default "effectonce"; bounds as in migrations.Options.
	Schema string
	// RecordBytesMax is the largest record that Publish accepts, in bytes: key, payload, headers
	// (and 10 bytes for each) and 192 bytes for what the relay and Kafka add. 1,024 to 100,000,000;
	// default 1,000,000. The topic's max.message.bytes must not be smaller.
	RecordBytesMax int
	// Inject adds headers from the context, such as the trace context, to every message.
	// OpenTelemetry's propagators fit:
	// func(ctx, h) { prop.Inject(ctx, propagation.MapCarrier(h)) }.
	// It does not replace a header that the message already has. Default: none.
	Inject func(ctx context.Context, headers map[string]string)
}

// Outbox publishes into one schema. It holds no connection and is safe for concurrent use.
type Outbox struct {
	insert, schedule, cancel, backlog string

	recordBytesMax int
	inject         func(ctx context.Context, headers map[string]string)
}

// New returns an outbox, or all problems of its configuration at once.
func New(cfg Config) (*Outbox, error) {
	schema, err := migrations.Options{Schema: cfg.Schema}.Resolve()
	size := cmp.Or(cfg.RecordBytesMax, RecordBytesMaxDefault)
	if size < 1024 || size > 100_000_000 {
		err = errors.Join(err, fmt.Errorf("RecordBytesMax %d: want 1024 to 100000000", cfg.RecordBytesMax))
	}
	if err != nil {
		return nil, err
	}
	return newOutbox(schema, size, cfg.Inject), nil
}

func newOutbox(schema string, recordBytesMax int, inject func(ctx context.Context, headers map[string]string)) *Outbox {
	in := func(sql string) string { return migrations.InSchema(sql, schema) }
	return &Outbox{
		insert: in(insertSQL), schedule: in(scheduleSQL), cancel: in(cancelSQL), backlog: in(backlogSQL),
		recordBytesMax: recordBytesMax, inject: inject,
	}
}

//nolint:gochecknoglobals // immutable: what the package-level functions use
var standard = newOutbox(migrations.DefaultSchema, RecordBytesMaxDefault, nil)

// Publish inserts messages into the default schema with the default limits; see Outbox.Publish.
func Publish(ctx context.Context, tx pgx.Tx, msgs ...Message) error {
	return standard.Publish(ctx, tx, msgs...)
}

// Collector is a transaction that collects messages itself and inserts them as its last statement.
// The transaction that package consumer passes to handlers is one; it also gives the messages IDs
// that are derived from the handled message.
type Collector interface {
	CollectOutbox(o *Outbox, msgs []Message) error
}

// Publish inserts any number of messages in the caller's transaction, with one statement (and
// another one for messages for later) and one round trip. They are published if and when tx
// commits. Before you publish for a key, take the lock that serialises the writers of that key
// (package documentation, Order).
//
// Inside a handler of package consumer the messages are kept until the end of the batch: the bytes
// of Key, Payload and Headers must not change until then.
//
// A message that Kafka would refuse gives an error that wraps ErrInvalid, with all problems of all
// messages; nothing is inserted and tx stays usable. After any other error tx is aborted.
func (o *Outbox) Publish(ctx context.Context, tx pgx.Tx, msgs ...Message) error {
	prepared, err := o.prepare(ctx, msgs)
	if err != nil || len(prepared) == 0 {
		return err
	}
	if collector, ok := tx.(Collector); ok {
		return collector.CollectOutbox(o, prepared)
	}
	return o.flush(ctx, tx, prepared)
}

// Queue adds the insert to a batch of statements, so that they share one round trip. The messages
// are checked as in Publish.
func (o *Outbox) Queue(ctx context.Context, batch *pgx.Batch, msgs ...Message) error {
	prepared, err := o.prepare(ctx, msgs)
	if err != nil || len(prepared) == 0 {
		return err
	}
	inserts, err := o.statements(prepared)
	if err != nil {
		return err
	}
	for _, s := range inserts {
		batch.Queue(s.sql, s.args...)
	}
	return nil
}

// prepare checks messages and adds the injected headers, without changing the caller's slice.
func (o *Outbox) prepare(ctx context.Context, msgs []Message) ([]Message, error) {
	var problems []error
	prepared := make([]Message, len(msgs))
	var injected map[string]string
	if o.inject != nil && len(msgs) > 0 {
		injected = map[string]string{}
		o.inject(ctx, injected)
	}
	for i, m := range msgs {
		m.Headers = mergeHeaders(m.Headers, injected)
		problems = append(problems, m.validate(i, o.recordBytesMax))
		prepared[i] = m
	}
	return prepared, errors.Join(problems...)
}

func mergeHeaders(own []Header, injected map[string]string) []Header {
	merged := own[:len(own):len(own)]
	for name, value := range injected {
		if !hasHeader(own, name) {
			merged = append(merged, Header{Name: name, Value: []byte(value)})
		}
	}
	return merged
}

func hasHeader(headers []Header, name string) bool {
	for _, h := range headers {
		if h.Name == name {
			return true
		}
	}
	return false
}

func (o *Outbox) flush(ctx context.Context, tx pgx.Tx, prepared []Message) error {
	inserts, err := o.statements(prepared)
	if err != nil {
		return err
	}
	if len(inserts) == 1 {
		_, err = tx.Exec(ctx, inserts[0].sql, inserts[0].args...)
	} else {
		batch := &pgx.Batch{}
		for _, s := range inserts {
			batch.Queue(s.sql, s.args...)
		}
		err = tx.SendBatch(ctx, batch).Close()
	}
	if err != nil {
		return fmt.Errorf("insert %d outbox rows: %w", len(prepared), err)
	}
	return nil
}

// arrays returns the columns of the messages as the parameters of insertSQL.
func arrays(msgs []Message) ([]any, error) {
	ids := make([]*[16]byte, len(msgs))
	topics := make([]string, len(msgs))
	keys := make([][]byte, len(msgs))
	payloads := make([][]byte, len(msgs))
	headers := make([]string, len(msgs))
	for i, m := range msgs {
		if m.ID != uuid.Nil {
			id := [16]byte(m.ID)
			ids[i] = &id
		}
		encoded, err := EncodeHeaders(m.storedHeaders())
		if err != nil {
			return nil, fmt.Errorf("encode headers of message %d: %w", i, err)
		}
		topics[i], keys[i], payloads[i], headers[i] = m.Topic, m.Key, m.Payload, string(encoded)
	}
	return []any{ids, topics, keys, payloads, headers}, nil
}
