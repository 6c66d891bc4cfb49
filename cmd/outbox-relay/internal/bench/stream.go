package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// The ways by which a stream's messages get to Kafka.
const (
	wayRelay   = "relay"
	wayExactly = "exactly_once"
	wayPoller  = "poller"
)

// pollEvery is how often the plain poller looks.
const pollEvery = 5 * time.Millisecond

// streamJob publishes messages at a steady rate, sends them to Kafka and reads them, all in one
// process.
type streamJob struct {
	Way       string
	Topic     string
	Name      string // of the relay
	Rate      int    // messages per second …
	PerCommit int    // … of which this many are in one transaction
	Seconds   int
	// Writers reach the database by this address; empty: the relay's.
	WritersURL string
}

// stream is a run of a streamJob.
type stream struct {
	*site
	streamJob

	progress string
	outbox   *outbox.Outbox
	pool     *pgxpool.Pool // of the writers
	client   *kgo.Client

	committed []atomic.Int64 // by message, in nanoseconds since zero; 0: not yet
	received  []atomic.Int64
	missing   int
	zero      time.Time
	warmUp    int       // messages that do not count
	busy      func()    // called before the first message that counts …
	quiet     func()    // … and when the last one was received, while everything still runs
	sent      time.Time // when the last one was due
}

// streamFound are the results of a stream after the warm-up.
type streamFound struct {
	Messages        int
	P50, P99        float64 // milliseconds
	PerSecond       float64 // published
	CPUSeconds      *float64
	ServerSeconds   *float64 // of PostgreSQL
	RoundTripMillis float64
}

func newStream(s *site, job streamJob, progress string) *stream {
	warmUp := min(int(streamWarmUp.Seconds()), job.Seconds) * job.Rate
	n := warmUp + job.Seconds*job.Rate
	return &stream{
		site: s, streamJob: job, progress: progress, warmUp: warmUp, missing: n, zero: time.Now().Add(-time.Second),
		committed: make([]atomic.Int64, n), received: make([]atomic.Int64, n), busy: func() {}, quiet: func() {},
	}
}

// measure runs the stream and returns its results.
func (s *stream) measure(ctx context.Context) (*streamFound, error) {
	at := s.WritersURL
	if at == "" {
		at = s.DatabaseURL
	}
	conn, err := pgx.Connect(ctx, at)
	if err != nil {
		return nil, fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	server, err := findServer(ctx, conn)
	if err != nil {
		return nil, err
	}
	found := &streamFound{}
	if found.RoundTripMillis, err = measureRoundTrip(ctx, s.DatabaseURL); err != nil {
		return nil, err
	}
	var mu sync.Mutex // writers and reader are goroutines of their own
	var own usage
	var its *float64
	used := &relayUsage{}
	s.busy = func() {
		mu.Lock()
		defer mu.Unlock()
		own, its = begin(), server.cpuSeconds()
	}
	s.quiet = func() {
		mu.Lock()
		defer mu.Unlock()
		own.end(used)
		found.CPUSeconds, found.ServerSeconds = used.CPUSeconds, since(its, server.cpuSeconds())
	}
	if err := s.run(ctx); err != nil {
		return nil, err
	}
	found.Messages = len(s.committed) - s.warmUp
	found.PerSecond = float64(found.Messages) / s.sent.Sub(own.at).Seconds()
	latencies := s.milliseconds()
	found.P50, found.P99 = percentile(latencies, 0.5), percentile(latencies, 0.99)
	return found, nil
}

// since returns a difference; nil if either value is unknown.
func since(before, after *float64) *float64 {
	if before == nil || after == nil {
		return nil
	}
	spent := *after - *before
	return &spent
}

func (s *stream) run(ctx context.Context) (err error) {
	if s.outbox, err = outbox.New(outbox.Config{Schema: s.schema}); err != nil {
		return err
	}
	near := &site{Servers: Servers{DatabaseURL: s.WritersURL}}
	if s.WritersURL == "" {
		near = s.site
	}
	if s.pool, err = near.newPool(ctx, streamWriters); err != nil {
		return err
	}
	defer s.pool.Close()
	ends, err := s.ends(ctx)
	if err != nil {
		return err
	}
	options := []kgo.Opt{kgo.SeedBrokers(s.Brokers...), kgo.ConsumePartitions(ends), kgo.FetchMinBytes(1)}
	if s.Way == wayExactly {
		options = append(options, kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	}
	if s.client, err = kgo.NewClient(options...); err != nil {
		return fmt.Errorf("kafka options: %w", err)
	}
	defer s.client.Close()
	group, ctx := errgroup.WithContext(ctx)
	sending, stop := context.WithCancel(ctx)
	group.Go(func() error { return s.send(sending) })
	group.Go(func() error { return s.publish(ctx) })
	group.Go(func() error {
		defer stop()
		return s.consume(ctx)
	})
	return group.Wait()
}

// send sends rows to Kafka until ctx ends.
func (s *stream) send(ctx context.Context) error {
	if s.Way == wayPoller {
		return s.poll(ctx)
	}
	pool, err := s.newPool(ctx, 4)
	if err != nil {
		return err
	}
	defer pool.Close()
	r, err := relay.New(pool, s.producer(), relay.Config{Schema: s.schema, Name: s.Name, ExactlyOnce: s.Way == wayExactly, ProgressTopic: s.progress})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

// poll is the plain poller: it looks every few milliseconds, and at once after a full batch.
func (s *stream) poll(ctx context.Context) error {
	conn, closeConn, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer closeConn()
	client, err := kgo.NewClient(s.producer()...)
	if err != nil {
		return fmt.Errorf("kafka options: %w", err)
	}
	defer client.Close()
	every := time.NewTicker(pollEvery)
	defer every.Stop()
	for {
		var n int
		err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) (err error) {
			n, err = s.pollOnce(ctx, tx, client)
			return err
		})
		if ctx.Err() != nil {
			return nil // told to stop
		}
		if err != nil {
			return err
		}
		if n == pollRows {
			continue
		}
		select {
		case <-ctx.Done():
			return nil
		case <-every.C:
		}
	}
}

// streamWarmUp does not count: the relay takes its lease, statements are prepared.
const streamWarmUp = 2 * time.Second

// stallMax is how long there may be no arrivals.
const stallMax = time.Minute

// streamWriters publish in turns, so that one slow commit does not delay the next.
const streamWriters = 8

// publish begins transactions by a schedule that a slow transaction does not shift.
func (s *stream) publish(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	due := make(chan int)
	group.Go(func() error {
		defer close(due)
		begun, every := time.Now(), time.Second*time.Duration(s.PerCommit)/time.Duration(s.Rate)
		for i := 0; i < len(s.committed); i += s.PerCommit {
			if !pause.For(ctx, time.Until(begun.Add(every*time.Duration(i/s.PerCommit)))) {
				return ctx.Err()
			}
			if i == s.warmUp {
				s.busy()
			}
			select {
			case due <- i:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		s.sent = time.Now()
		return nil
	})
	for range streamWriters {
		group.Go(func() error {
			for first := range due {
				if err := s.commit(ctx, first, min(first+s.PerCommit, len(s.committed))); err != nil {
					return fmt.Errorf("publish: %w", err)
				}
			}
			return nil
		})
	}
	return group.Wait()
}

// ends returns where the reader begins.
func (s *stream) ends(ctx context.Context) (map[string]map[int32]kgo.Offset, error) {
	client, err := kgo.NewClient(kgo.SeedBrokers(s.Brokers...))
	if err != nil {
		return nil, fmt.Errorf("kafka options: %w", err)
	}
	defer client.Close()
	ends, err := kadm.NewClient(client).ListEndOffsets(ctx, s.Topic)
	if err = errors.Join(err, ends.Error()); err != nil {
		return nil, fmt.Errorf("read the end offsets of topic %s: %w", s.Topic, err)
	}
	return ends.KOffsets(), nil
}

// commit publishes the messages from first up to end in one transaction.
func (s *stream) commit(ctx context.Context, first, end int) error {
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		for i := first; i < end; i++ {
			if err := s.publishOne(ctx, tx, i); err != nil {
				return err
			}
		}
		return nil
	})
	now := int64(time.Since(s.zero))
	for i := first; i < end; i++ {
		s.committed[i].Store(now)
	}
	return err
}

func (s *stream) publishOne(ctx context.Context, tx pgx.Tx, i int) error {
	payload, key := make([]byte, payloadBytes), fmt.Appendf(nil, "account-%d", i%keysDistinct)
	binary.BigEndian.PutUint64(payload, uint64(i))
	if s.Way == wayPoller {
		_, err := tx.Exec(ctx, s.sql(enqueueSQL), [16]byte(uuid.New()), s.Topic, key, payload)
		return err
	}
	return s.outbox.Publish(ctx, tx, outbox.Message{Topic: s.Topic, Key: key, Payload: payload})
}

// consume polls until every message was received.
func (s *stream) consume(ctx context.Context) error {
	for s.missing > 0 {
		polling, cancel := context.WithTimeout(ctx, stallMax)
		fetches := s.client.PollFetches(polling)
		now := int64(time.Since(s.zero))
		stalled := polling.Err() != nil && ctx.Err() == nil
		cancel()
		if stalled {
			return fmt.Errorf("%d of %d messages did not arrive within %v: this is a bug, please report it", s.missing, len(s.received), stallMax)
		}
		if err := errors.Join(ctx.Err(), fetches.Err()); err != nil {
			return fmt.Errorf("fetch: %w", err)
		}
		fetches.EachRecord(func(record *kgo.Record) {
			if i := binary.BigEndian.Uint64(record.Value); s.received[i].CompareAndSwap(0, now) { // the relay delivers at least once
				s.missing--
			}
		})
	}
	s.quiet()
	return nil
}

// milliseconds returns the latencies without the warm-up. A record that arrived before its writer's
// COMMIT returned took no time.
func (s *stream) milliseconds() []float64 {
	latencies := make([]float64, 0, len(s.committed)-s.warmUp)
	for i := s.warmUp; i < len(s.committed); i++ {
		took := time.Duration(s.received[i].Load() - s.committed[i].Load())
		latencies = append(latencies, max(0, took.Seconds()*1000))
	}
	return latencies
}
