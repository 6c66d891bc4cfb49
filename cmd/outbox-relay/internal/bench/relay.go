package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/record"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// relayBench is one run of Relay.
type relayBench struct {
	*site

	drained string // the topic of the backlog
	// progress is the topic where the relay keeps its progress with exactly-once.
	progress string
}

// producer returns the options with which every variant produces: those that the relay uses anyway
// (idempotent, acks=all, no linger because a page is already a batch), and the client's default
// compression.
func (s *site) producer() []kgo.Opt {
	return []kgo.Opt{kgo.SeedBrokers(s.Brokers...), kgo.RequiredAcks(kgo.AllISRAcks()), kgo.ProducerLinger(0)}
}

// Relay measures how many rows per second of a backlog reach Kafka through the textbook's poller,
// through a bare cursor that guarantees nothing, and through the relay. It also measures how long a
// single message takes from its commit until a consumer has it.
func Relay(ctx context.Context, opts Options) (_ *Report, err error) {
	s, err := newSite(ctx, opts)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.remove(ctx)) }()
	b := &relayBench{site: s}
	if b.drained, err = b.topic(ctx, "drain", relayPartitions); err != nil {
		return nil, err
	}
	if b.progress, err = b.topic(ctx, "progress", 1); err != nil {
		return nil, err
	}
	steady, err := b.topic(ctx, "latency", relayPartitions)
	if err != nil {
		return nil, err
	}
	if err := b.exec(ctx, "create the poller's table", pollerTableSQL); err != nil {
		return nil, err
	}
	if err := b.fill(ctx); err != nil {
		return nil, err
	}
	nothing := func(context.Context) error { return nil }
	if err := b.rounds(
		b.drains(ctx, "skip_locked", b.refill, b.skipLocked),
		b.drains(ctx, "bare_cursor", nothing, b.bareCursor),
		b.drains(ctx, "relay", nothing, b.relay),
		b.drains(ctx, "exactly_once", nothing, b.exactlyOnce),
	); err != nil {
		return nil, err
	}
	// Behind all drains, which would have to publish these messages, too.
	for round := range b.Rounds {
		if err := b.latency(ctx, round, steady); err != nil {
			return nil, err
		}
	}
	return newReport([]Figure{
		{Key: "skip_locked", Text: "textbook: FOR UPDATE SKIP LOCKED", Unit: rowRate},
		{Key: "bare_cursor", Text: "guarantees nothing", Unit: rowRate},
		{Key: "relay", Text: "at least once", Unit: rowRate},
		{Key: "exactly_once", Text: "relay --exactly-once", Unit: rowRate},
		{Key: "p50_ms", Text: "from commit to consumable", Unit: "ms", Digits: 2},
		{Key: "p99_ms", Text: "from commit to consumable", Unit: "ms", Digits: 2},
	}, s.samples).sized("rows", opts.Rows, rowsTelling, opts.Rounds), nil
}

// fillRows is how many rows one transaction of the backlog has.
const fillRows = 5000

// fill publishes the backlog once: each relay has its own name and reads it from the beginning.
func (b *relayBench) fill(ctx context.Context) error {
	b.note("publishing a backlog of %d rows", b.Rows)
	for from := 1; from <= b.Rows; from += fillRows {
		to := min(from+fillRows-1, b.Rows)
		if _, err := b.pool.Exec(ctx, b.sql(fillSQL), b.drained, keysDistinct, payloadBytes, from, to); err != nil {
			return fmt.Errorf("publish a backlog: %w", err)
		}
	}
	return b.exec(ctx, "vacuum the outbox", "VACUUM (ANALYZE) effectonce.outbox")
}

// refill gives the poller the same rows as the relay, also freshly vacuumed.
func (b *relayBench) refill(ctx context.Context) error {
	return errors.Join(
		b.exec(ctx, "empty the poller's table", emptyPollerSQL),
		b.exec(ctx, "fill the poller's table", refillSQL),
		b.exec(ctx, "vacuum the poller's table", "VACUUM (ANALYZE) effectonce.bench_poller"),
	)
}

// drains returns a variant, which sends the backlog to Kafka. Its run returns when everything is
// acknowledged; then the records that arrived are counted.
func (b *relayBench) drains(ctx context.Context, key string, prepare func(context.Context) error, run func(context.Context, int) error) func(int) error {
	return func(round int) error {
		if err := errors.Join(prepare(ctx), b.emptyTopic(ctx), b.checkpoint(ctx)); err != nil {
			return err
		}
		before, err := b.written(ctx)
		if err != nil {
			return err
		}
		begin := time.Now()
		if err := run(ctx, round); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		elapsed := time.Since(begin)
		after, err := b.written(ctx)
		if err != nil {
			return err
		}
		if got := after - before; got != int64(b.Rows) && (key != "exactly_once" || got < int64(b.Rows)) { // which writes markers, too
			return fmt.Errorf("%s: %d rows became %d records: this is a bug, the figures are void; please report it", key, b.Rows, got)
		}
		b.rate(key, float64(b.Rows)/elapsed.Seconds())
		return nil
	}
}

// emptyTopic keeps records from accumulating on the brokers, whose memory may be this process's.
func (b *relayBench) emptyTopic(ctx context.Context) error {
	ends, err := b.Ends(ctx, b.drained)
	if err != nil {
		return err
	}
	deleted, err := b.Admin.DeleteRecords(ctx, ends.Offsets())
	if err = errors.Join(err, deleted.Error()); err != nil {
		return fmt.Errorf("empty topic %s: %w", b.drained, err)
	}
	return nil
}

// written returns how many records the topic has had.
func (b *relayBench) written(ctx context.Context) (n int64, err error) {
	ends, err := b.Ends(ctx, b.drained)
	if err != nil {
		return 0, err
	}
	ends.Each(func(end kadm.ListedOffset) { n += end.Offset })
	return n, nil
}

// relayName gives each round a relay with its own progress.
func relayName(round int) string { return "round-" + strconv.Itoa(round) }

// relay drains with package relay, which stores its progress during the drain.
func (b *relayBench) relay(ctx context.Context, round int) error {
	return b.drain(ctx, relay.Config{Name: relayName(round)})
}

// exactlyOnce does the same with records and progress in Kafka transactions.
func (b *relayBench) exactlyOnce(ctx context.Context, round int) error {
	if err := b.drain(ctx, relay.Config{Name: relayName(round) + "-exactly-once", ExactlyOnce: true, ProgressTopic: b.progress}); err != nil {
		return err
	}
	return b.marked(ctx)
}

// marked waits until the brokers have written the markers of all transactions: otherwise the next
// run would count them.
func (b *relayBench) marked(ctx context.Context) error {
	for {
		ends, err := b.Ends(ctx, b.drained)
		if err != nil {
			return err
		}
		stable, err := b.Admin.ListCommittedOffsets(ctx, b.drained)
		if err = errors.Join(err, stable.Error()); err != nil {
			return fmt.Errorf("read the end offsets of topic %s: %w", b.drained, err)
		}
		open := false
		ends.Each(func(end kadm.ListedOffset) {
			at, _ := stable.Lookup(end.Topic, end.Partition)
			open = open || at.Offset < end.Offset
		})
		if !open {
			return nil
		}
	}
}

func (b *relayBench) drain(ctx context.Context, cfg relay.Config) error {
	pool, err := b.newPool(ctx, 4)
	if err != nil {
		return err
	}
	defer pool.Close()
	cfg.Schema = b.Schema
	r, err := relay.New(pool, b.producer(), cfg)
	if err != nil {
		return err
	}
	published, err := r.Drain(ctx)
	if err != nil {
		return err
	}
	if published != int64(b.Rows) {
		return fmt.Errorf("the relay counted %d of %d rows: this is a bug, the figures are void; please report it", published, b.Rows)
	}
	return nil
}

// pollRows is the poller's batch: the best of 100, 300, 1,000, 3,000 and 10,000 rows.
const pollRows = 3000

// skipLocked is the poller of the textbook: lock a batch of waiting rows, produce them, delete
// them, commit. There is only one: a second would break the order of a key.
func (b *relayBench) skipLocked(ctx context.Context, _ int) error {
	pool, err := b.newPool(ctx, 1)
	if err != nil {
		return err
	}
	defer pool.Close()
	client, err := kgo.NewClient(b.producer()...)
	if err != nil {
		return fmt.Errorf("kafka options: %w", err)
	}
	defer client.Close()
	for more := true; more; {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
			more, err = b.pollOnce(ctx, tx, client)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// pollOnce reports whether there were rows.
func (b *relayBench) pollOnce(ctx context.Context, tx pgx.Tx, client *kgo.Client) (bool, error) {
	page, places, err := readPage(ctx, tx, b.sql(pollSQL), pollRows)
	if err != nil || len(page) == 0 {
		return false, err
	}
	if err := client.ProduceSync(ctx, page...).FirstErr(); err != nil {
		return false, fmt.Errorf("produce: %w", err)
	}
	if _, err := tx.Exec(ctx, b.sql(publishedSQL), places); err != nil {
		return false, fmt.Errorf("delete published rows: %w", err)
	}
	return true, nil
}

// postgresEpoch is the zero of binary timestamps, in Unix microseconds.
const postgresEpoch = 946_684_800 * 1_000_000

// readPage makes the same records as the relay, and returns them with the places of their rows. As
// the relay, it reads values in binary form. The last argument of the statement is the number of
// rows.
func readPage(ctx context.Context, db operator.Querier, sql string, args ...any) (page []*kgo.Record, places []int64, err error) {
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		return nil, nil, fmt.Errorf("read rows: %w", err)
	}
	defer rows.Close()
	n := args[len(args)-1].(int)
	page, places = make([]*kgo.Record, 0, n), make([]int64, 0, n)
	maker := record.NewMaker(n)
	for rows.Next() {
		v := rows.RawValues()
		var own []outbox.Header
		if string(v[5]) != "{}" {
			if own, err = outbox.DecodeHeaders(v[5]); err != nil {
				return nil, nil, fmt.Errorf("read a row's headers: %w", err)
			}
		}
		places = append(places, int64(binary.BigEndian.Uint64(v[0])))
		page = append(page, record.Make(maker, record.Row{
			ID: uuid.UUID(v[1]), Topic: string(v[2]), Key: bytes.Clone(v[3]), Payload: bytes.Clone(v[4]),
			CreatedAt: time.UnixMicro(int64(binary.BigEndian.Uint64(v[6])) + postgresEpoch),
		}, own))
	}
	if err := rows.Err(); err != nil {
		return nil, nil, fmt.Errorf("read rows: %w", err)
	}
	return page, places, nil
}

// cursorRows is the page of the cursor, and cursorInFlight how many records may be unacknowledged.
const cursorRows, cursorInFlight = 5000, 50_000

// bareCursor reads by row number and produces without waiting. It is only an upper bound for the
// relay: it keeps no progress, and loses a transaction that commits late. As the relay does, it
// reads the next page while it sends.
func (b *relayBench) bareCursor(ctx context.Context, _ int) error {
	pool, err := b.newPool(ctx, 1)
	if err != nil {
		return err
	}
	defer pool.Close()
	client, err := kgo.NewClient(append(b.producer(), kgo.MaxBufferedRecords(cursorInFlight))...)
	if err != nil {
		return fmt.Errorf("kafka options: %w", err)
	}
	defer client.Close()
	ctx, fail := context.WithCancelCause(ctx)
	pages := make(chan []*kgo.Record, 1)
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer close(pages)
		if err := readPages(ctx, pool, b.sql(cursorSQL), pages); err != nil {
			fail(err)
		}
	}()
	defer func() {
		fail(nil)
		for range pages { // of a run that failed
		}
		<-read // its connection is free
	}()
	promise := func(_ *kgo.Record, err error) {
		if err != nil {
			fail(fmt.Errorf("produce: %w", err))
		}
	}
	for page := range pages {
		for _, r := range page {
			client.Produce(ctx, r, promise) // waits while too many are unacknowledged
		}
	}
	return errors.Join(client.Flush(ctx), context.Cause(ctx))
}

// readPages stops at an empty page.
func readPages(ctx context.Context, db operator.Querier, sql string, pages chan<- []*kgo.Record) error {
	for last := int64(0); ; {
		page, places, err := readPage(ctx, db, sql, last, cursorRows)
		if err != nil || len(page) == 0 {
			return err
		}
		last = places[len(places)-1]
		select {
		case pages <- page:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

const (
	latencyPerSecond = 500
	latencySeconds   = 5
	// warmUpSeconds do not count: the relay takes its lease, statements are prepared.
	warmUpSeconds = 2
	// writers publish in turns, so that one slow commit does not delay the next.
	writers = 8
	// stallMax is how long there may be no arrivals.
	stallMax = time.Minute
)

// stream publishes messages at a steady rate while a relay sends them to Kafka and a reader polls
// them. Its latencies are from the return of COMMIT until a poll returned the record, both in this
// process.
type stream struct {
	*relayBench

	topic     string
	outbox    *outbox.Outbox
	pool      *pgxpool.Pool  // of the writers
	committed []atomic.Int64 // by message, in nanoseconds since zero; 0: not yet
	received  []atomic.Int64
	zero      time.Time
}

// latency measures one round with a relay that has published all existing rows.
func (b *relayBench) latency(ctx context.Context, round int, topic string) error {
	const n = (warmUpSeconds + latencySeconds) * latencyPerSecond
	s := &stream{
		relayBench: b, topic: topic, zero: time.Now().Add(-time.Second),
		committed: make([]atomic.Int64, n), received: make([]atomic.Int64, n),
	}
	if err := s.run(ctx); err != nil {
		return fmt.Errorf("round %d: latency: %w", round+1, err)
	}
	const warmUp = warmUpSeconds * latencyPerSecond
	latencies := make([]float64, 0, n-warmUp)
	for i := warmUp; i < n; i++ {
		took := time.Duration(s.received[i].Load() - s.committed[i].Load())
		// A record that arrived before its writer's COMMIT returned took no time.
		latencies = append(latencies, max(0, took.Seconds()*1000))
	}
	p50, p99 := percentile(latencies, 0.5), percentile(latencies, 0.99)
	b.samples.add("p50_ms", p50)
	b.samples.add("p99_ms", p99)
	b.note("round %d: %d messages a second: p50 %.2f ms, p99 %.2f ms", round+1, latencyPerSecond, p50, p99)
	return nil
}

func (s *stream) run(ctx context.Context) (err error) {
	if s.outbox, err = outbox.New(outbox.Config{Schema: s.Schema}); err != nil {
		return err
	}
	if s.pool, err = s.newPool(ctx, writers); err != nil {
		return err
	}
	defer s.pool.Close()
	relayPool, err := s.newPool(ctx, 4)
	if err != nil {
		return err
	}
	defer relayPool.Close()
	sender, err := relay.New(relayPool, s.producer(), relay.Config{Schema: s.Schema, Name: relayName(s.Rounds - 1)})
	if err != nil {
		return err
	}
	ends, err := s.Ends(ctx, s.topic)
	if err != nil {
		return err
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(s.Brokers...), kgo.ConsumePartitions(ends.KOffsets()), kgo.FetchMinBytes(1))
	if err != nil {
		return fmt.Errorf("kafka options: %w", err)
	}
	defer client.Close()
	group, ctx := errgroup.WithContext(ctx)
	sending, stop := context.WithCancel(ctx)
	group.Go(func() error { return sender.Run(sending) })
	group.Go(func() error { return s.publish(ctx) })
	group.Go(func() error {
		defer stop()
		return s.consume(ctx, client)
	})
	return group.Wait()
}

// publish begins transactions by a schedule that a slow transaction does not shift.
func (s *stream) publish(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	due := make(chan int)
	group.Go(func() error {
		defer close(due)
		begun := time.Now()
		for i := range s.committed {
			if !pause.For(ctx, time.Until(begun.Add(time.Second/latencyPerSecond*time.Duration(i)))) {
				return ctx.Err()
			}
			select {
			case due <- i:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return nil
	})
	for range writers {
		group.Go(func() error {
			for i := range due {
				err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
					payload := make([]byte, payloadBytes)
					binary.BigEndian.PutUint64(payload, uint64(i))
					return s.outbox.Publish(ctx, tx, outbox.Message{Topic: s.topic, Key: fmt.Appendf(nil, "account-%d", i%keysDistinct), Payload: payload})
				})
				if err != nil {
					return fmt.Errorf("publish: %w", err)
				}
				s.committed[i].Store(int64(time.Since(s.zero)))
			}
			return nil
		})
	}
	return group.Wait()
}

// consume polls until every message was received.
func (s *stream) consume(ctx context.Context, client *kgo.Client) error {
	for missing := len(s.received); missing > 0; {
		polling, cancel := context.WithTimeout(ctx, stallMax)
		fetches := client.PollFetches(polling)
		now := int64(time.Since(s.zero))
		stalled := polling.Err() != nil && ctx.Err() == nil
		cancel()
		if stalled {
			return fmt.Errorf("%d of %d messages did not arrive within %v: this is a bug, please report it", missing, len(s.received), stallMax)
		}
		if err := errors.Join(ctx.Err(), fetches.Err()); err != nil {
			return fmt.Errorf("fetch: %w", err)
		}
		fetches.EachRecord(func(record *kgo.Record) {
			if i := binary.BigEndian.Uint64(record.Value); s.received[i].CompareAndSwap(0, now) { // the relay delivers at least once
				missing--
			}
		})
	}
	return nil
}
