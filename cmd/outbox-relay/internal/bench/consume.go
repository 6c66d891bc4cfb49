package bench

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/nodedup"
	"github.com/effectonce/effectonce/outbox"
)

// consumeBench is one run of Consume.
type consumeBench struct{ *site }

// load is a topic with its messages. Each group reads it from the start.
type load struct {
	topic    string
	messages int
}

// Consume measures how many messages per second, each with an effect of one insert, the textbook
// loop and the engine handle. It also measures how much space and write-ahead log a claim takes.
func Consume(ctx context.Context, opts Options) (_ *Report, err error) {
	s, err := newSite(ctx, opts)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.remove(ctx)) }()
	b := consumeBench{s}
	if err := b.exec(ctx, "create the benchmark's tables", tablesSQL); err != nil {
		return nil, err
	}
	// The textbook gets fewer messages, so that each run takes a second or more, and all of them
	// do not take long.
	few, err := b.load(ctx, "textbook", max(MessagesMin/10, b.Messages/40))
	if err != nil {
		return nil, err
	}
	all, err := b.load(ctx, "engine", b.Messages)
	if err != nil {
		return nil, err
	}
	if err := b.rounds(
		b.variant(ctx, "textbook", few, b.textbook),
		b.variant(ctx, "by_id", all, b.engine(consumer.DedupByID)),
		b.variant(nodedup.With(ctx), "no_dedup", all, b.engine(consumer.DedupByID)),
		b.variant(ctx, "by_position", all, b.engine(consumer.DedupByPosition)),
	); err != nil {
		return nil, err
	}
	b.compare("by_id", "no_dedup", all.messages, "bytes_per_message", "wal_bytes_per_message")
	return newReport([]Figure{
		{Key: "textbook", Text: "one message per transaction", Unit: messageRate},
		{Key: "no_dedup", Text: "engine without claims", Unit: messageRate},
		{Key: "by_id", Text: "engine with claims", Unit: messageRate},
		{Key: "by_position", Text: "engine by position", Unit: messageRate},
		{Key: "bytes_per_message", Text: "claim: table and index", Unit: "bytes"},
		{Key: "wal_bytes_per_message", Text: "claim: write-ahead log", Unit: "bytes"},
	}, s.samples).sized("messages", opts.Messages, messagesTelling, opts.Rounds), nil
}

// load fills a topic.
func (b consumeBench) load(ctx context.Context, name string, messages int) (load, error) {
	topic, err := b.topic(ctx, name, consumePartitions)
	if err != nil {
		return load{}, err
	}
	b.note("producing %d messages for %s", messages, name)
	return load{topic, messages}, b.produce(ctx, load{topic, messages})
}

// variant handles a load as a group of its own.
func (b consumeBench) variant(ctx context.Context, key string, l load, run func(ctx context.Context, l load, group string) (float64, error)) func(int) error {
	return func(round int) error {
		return b.turn(ctx, key, l.messages, func(ctx context.Context) (float64, error) {
			return run(ctx, l, b.group(key+"-"+strconv.Itoa(round)))
		})
	}
}

// errAllDone stops a consumer that handled everything.
var errAllDone = errors.New("every message is handled")

// engine is package consumer with a level of deduplication. It uses only defaults; the effects of a
// batch go in one round trip.
func (b consumeBench) engine(level consumer.Dedup) func(context.Context, load, string) (float64, error) {
	return func(ctx context.Context, l load, group string) (float64, error) {
		pool, err := b.newPool(ctx, consumePartitions+2)
		if err != nil {
			return 0, err
		}
		defer pool.Close()
		effect := b.sql(effectSQL)
		handler := consumer.Queued(func(_ context.Context, q *consumer.Queue, msg *consumer.Message) error {
			q.Queue(effect, string(msg.Key), msg.Value)
			return nil
		})
		run, stop := context.WithCancelCause(ctx)
		defer stop(nil)
		m := &meter{want: l.messages}
		c, err := consumer.New(pool, []kgo.Opt{kgo.SeedBrokers(b.Brokers...)}, handler, consumer.Config{
			Group: group, Topics: []string{l.topic}, Schema: b.Schema, Dedup: level, Logger: slog.New(slog.DiscardHandler), // errors end the run
			Hooks: consumer.Hooks{
				Processed: func(p consumer.Processed) {
					if m.add(p.Fresh + p.Duplicates + p.Parked) {
						stop(errAllDone)
					}
				},
				Failed: func(f consumer.Failed) { stop(fmt.Errorf("%s: %w", f.Message, f.Err)) },
			},
		})
		if err != nil {
			return 0, err
		}
		if err := c.Run(run); err != nil {
			return 0, err
		}
		if cause := context.Cause(run); !errors.Is(cause, errAllDone) {
			return 0, cause
		}
		return m.rate()
	}
}

// markEvery is how often the textbook's loop commits offsets to Kafka: as often as the engine.
const markEvery = time.Second

// textbook is the loop from articles about the idempotent consumer: for each message a transaction
// that inserts the ID, writes the effect if the ID was new, and commits; then the offset is marked.
// The driver prepares the statements once, and the client commits offsets in the background, once a
// second.
func (b consumeBench) textbook(ctx context.Context, l load, group string) (float64, error) {
	pool, err := b.newPool(ctx, 1)
	if err != nil {
		return 0, err
	}
	defer pool.Close()
	client, err := kgo.NewClient(
		kgo.SeedBrokers(b.Brokers...),
		kgo.ConsumerGroup(group),
		kgo.ConsumeTopics(l.topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.AutoCommitMarks(),
		kgo.AutoCommitInterval(markEvery),
	)
	if err != nil {
		return 0, fmt.Errorf("kafka options: %w", err)
	}
	defer client.Close()
	m := &meter{want: l.messages}
	for {
		fetches := client.PollFetches(ctx)
		if err := errors.Join(ctx.Err(), fetches.Err()); err != nil {
			return 0, fmt.Errorf("fetch: %w", err)
		}
		for _, record := range fetches.Records() {
			if err := b.handleTextbook(ctx, pool, group, record); err != nil {
				return 0, fmt.Errorf("handle offset %d: %w", record.Offset, err)
			}
			client.MarkCommitRecords(record)
			if m.add(1) {
				return m.rate()
			}
		}
	}
}

func (b consumeBench) handleTextbook(ctx context.Context, pool *pgxpool.Pool, group string, record *kgo.Record) error {
	var id string
	for _, header := range record.Headers {
		if header.Key == outbox.HeaderMessageID {
			id = string(header.Value)
		}
	}
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		claimed, err := tx.Exec(ctx, b.sql(textbookClaimSQL), id, group)
		if err != nil || claimed.RowsAffected() == 0 {
			return err
		}
		_, err = tx.Exec(ctx, b.sql(effectSQL), string(record.Key), record.Value)
		return err
	})
}

// idsPerMillisecond is the density of the messages' IDs in time: as of several producers that
// together write 20,000 messages per second.
const idsPerMillisecond = 20

// produce fills a topic. It returns when all messages are acknowledged.
func (b consumeBench) produce(ctx context.Context, l load) error {
	begin := time.Now().Add(-time.Duration(l.messages/idsPerMillisecond) * time.Millisecond)
	produced := kgo.AbortingFirstErrPromise(b.Client)
	for i := range l.messages {
		id := messageID(begin.Add(time.Duration(i/idsPerMillisecond) * time.Millisecond))
		b.Client.Produce(ctx, &kgo.Record{
			Topic:   l.topic,
			Key:     []byte("account-" + strconv.Itoa(i%keysDistinct)),
			Value:   body(i),
			Headers: []kgo.RecordHeader{{Key: outbox.HeaderMessageID, Value: []byte(id.String())}},
		}, produced.Promise())
	}
	if err := produced.Err(); err != nil {
		return fmt.Errorf("produce to topic %s: %w", l.topic, err)
	}
	return nil
}

// messageID makes a UUIDv7 of a given time. The IDs of one millisecond are in no order, as with
// several producers.
func messageID(at time.Time) uuid.UUID {
	var id uuid.UUID
	_, _ = rand.Read(id[6:]) // never fails: crypto/rand documents it
	var milli [8]byte
	binary.BigEndian.PutUint64(milli[:], uint64(at.UnixMilli()))
	copy(id[:6], milli[2:])
	id[6] = id[6]&0x0f | 0x70
	id[8] = id[8]&0x3f | 0x80
	return id
}

// body is different for each message, so that effects can be distinguished.
func body(i int) []byte {
	value := make([]byte, 0, consumeValueBytes)
	value = fmt.Appendf(value, `{"order":%d,"state":"paid","amount":%d,"currency":"EUR","note":"`, i, i%9973)
	for len(value) < consumeValueBytes-2 {
		value = append(value, 'a'+byte((i+len(value))%26))
	}
	return append(value, `"}`...)
}
