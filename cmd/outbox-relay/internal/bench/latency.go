package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

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
