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
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/nodedup"
	"github.com/effectonce/effectonce/outbox"
)

// consumeBench is one run of Consume.
type consumeBench struct {
	*site

	samples samples
}

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
	b := &consumeBench{site: s, samples: samples{}}
	if err := b.exec(ctx, "create the benchmark's tables", consumeTablesSQL); err != nil {
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
	for round := range b.Rounds {
		if err := b.round(ctx, round, few, all); err != nil {
			return nil, fmt.Errorf("round %d: %w", round+1, err)
		}
	}
	return newReport([]Figure{
		{Key: "textbook", Text: "one message per transaction", Unit: messageRate},
		{Key: "no_dedup", Text: "engine without claims", Unit: messageRate},
		{Key: "by_id", Text: "engine with claims", Unit: messageRate},
		{Key: "by_position", Text: "engine by position", Unit: messageRate},
		{Key: "bytes_per_message", Text: "claim: table and index", Unit: "bytes"},
		{Key: "wal_bytes_per_message", Text: "claim: write-ahead log", Unit: "bytes"},
	}, b.samples).sized("messages", opts.Messages, messagesTelling, opts.Rounds), nil
}

// load fills a topic.
func (b *consumeBench) load(ctx context.Context, name string, messages int) (load, error) {
	topic, err := b.topic(ctx, name, consumePartitions)
	if err != nil {
		return load{}, err
	}
	b.note("producing %d messages for %s", messages, name)
	return load{topic, messages}, b.produce(ctx, load{topic, messages})
}

// round runs every variant once. The order rotates, so that no variant always comes first.
func (b *consumeBench) round(ctx context.Context, round int, few, all load) error {
	var with, without footprint
	turns := []func() error{
		func() error {
			_, err := b.turn(ctx, round, "textbook", few, b.textbook)
			return err
		},
		func() (err error) {
			with, err = b.turn(ctx, round, "by_id", all, b.engine(consumer.DedupByID))
			return err
		},
		func() (err error) {
			without, err = b.turn(nodedup.With(ctx), round, "no_dedup", all, b.engine(consumer.DedupByID))
			return err
		},
		func() error {
			_, err := b.turn(ctx, round, "by_position", all, b.engine(consumer.DedupByPosition))
			return err
		},
	}
	for i := range turns {
		if err := turns[(i+round)%len(turns)](); err != nil {
			return err
		}
	}
	b.samples.add("bytes_per_message", float64(with.claims)/float64(all.messages))
	if b.mayCheckpoint {
		b.samples.add("wal_bytes_per_message", float64(with.wal-without.wal)/float64(all.messages))
	}
	return nil
}

// variant handles a load as a group, and returns its rate.
type variant func(ctx context.Context, l load, group string) (float64, error)

// footprint is the space that a run took, or what there is of it.
type footprint struct{ claims, wal int64 }

func (b *consumeBench) footprint(ctx context.Context) (f footprint, err error) {
	if err = b.pool.QueryRow(ctx, b.sql(footprintSQL)).Scan(&f.claims, &f.wal); err != nil {
		err = fmt.Errorf("read the size of processed_messages and of the write-ahead log: %w", err)
	}
	return f, err
}

// turn runs a variant in empty tables, right after a checkpoint, and returns the space that it
// took. The write-ahead log is the whole server's: on a server with other work it is too high.
func (b *consumeBench) turn(ctx context.Context, round int, key string, l load, run variant) (took footprint, err error) {
	if err := errors.Join(b.exec(ctx, "empty the tables", forgetSQL), b.checkpoint(ctx)); err != nil {
		return took, err
	}
	before, err := b.footprint(ctx)
	if err != nil {
		return took, err
	}
	rate, err := run(ctx, l, b.group(key+"-"+strconv.Itoa(round)))
	if err != nil {
		return took, fmt.Errorf("%s: %w", key, err)
	}
	// Before anything reads the tables: the first reader of a page may log it once more.
	after, err := b.footprint(ctx)
	if err != nil {
		return took, err
	}
	return footprint{after.claims - before.claims, after.wal - before.wal}, b.finish(ctx, key, round, l, rate)
}

// finish keeps a run's figure if every message had its effect exactly once.
func (b *consumeBench) finish(ctx context.Context, key string, round int, l load, rate float64) error {
	var effects, different int
	if err := b.pool.QueryRow(ctx, b.sql(effectsSQL)).Scan(&effects, &different); err != nil {
		return fmt.Errorf("%s: count the effects: %w", key, err)
	}
	if effects != l.messages || different != l.messages {
		return fmt.Errorf("%s: %d messages had %d effects, of %d messages: this is a bug, the figures are void; please report it",
			key, l.messages, effects, different)
	}
	b.samples.add(key, rate)
	b.note("round %d: %-14s %9.0f messages/s", round+1, key, rate)
	return nil
}

// errAllDone stops a consumer that handled everything.
var errAllDone = errors.New("every message is handled")

// engine is package consumer with a level of deduplication. It uses only defaults; the effects of a
// batch go in one round trip.
func (b *consumeBench) engine(level consumer.Dedup) variant {
	return func(ctx context.Context, l load, group string) (float64, error) {
		return b.consume(ctx, l, group, level)
	}
}

func (b *consumeBench) consume(ctx context.Context, l load, group string, level consumer.Dedup) (float64, error) {
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

// markEvery is how often the textbook's loop commits offsets to Kafka: as often as the engine.
const markEvery = time.Second

// textbook is the loop from articles about the idempotent consumer: for each message a transaction
// that inserts the ID, writes the effect if the ID was new, and commits; then the offset is marked.
// The statements are prepared once, and the client commits offsets in the background, once a
// second.
func (b *consumeBench) textbook(ctx context.Context, l load, group string) (float64, error) {
	conn, closeConn, err := b.Connect(ctx)
	if err != nil {
		return 0, err
	}
	defer closeConn()
	for name, sql := range map[string]string{"claim": textbookClaimSQL, "effect": effectSQL} {
		if _, err := conn.Prepare(ctx, name, b.sql(sql)); err != nil {
			return 0, fmt.Errorf("prepare: %w", err)
		}
	}
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
			if err := handleTextbook(ctx, conn, group, record); err != nil {
				return 0, fmt.Errorf("handle offset %d: %w", record.Offset, err)
			}
			client.MarkCommitRecords(record)
			if m.add(1) {
				return m.rate()
			}
		}
	}
}

func handleTextbook(ctx context.Context, conn *pgx.Conn, group string, record *kgo.Record) error {
	var id string
	for _, header := range record.Headers {
		if header.Key == outbox.HeaderMessageID {
			id = string(header.Value)
		}
	}
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		claimed, err := tx.Exec(ctx, "claim", id, group)
		if err != nil || claimed.RowsAffected() == 0 {
			return err
		}
		_, err = tx.Exec(ctx, "effect", string(record.Key), record.Value)
		return err
	})
}

// idsPerMillisecond is the density of the messages' IDs in time: as of several producers that
// together write 20,000 messages per second.
const idsPerMillisecond = 20

// produce fills a topic. It returns when all messages are acknowledged.
func (b *consumeBench) produce(ctx context.Context, l load) error {
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
