package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// latencyWriters publish in turns, so that one slow commit does not hold back the next message.
const latencyWriters = 4

// latencyRun measures from the return of COMMIT until a poll returned the record, both in this process.
type latencyRun struct {
	*relayBench

	topic  string
	pool   *pgxpool.Pool
	outbox *outbox.Outbox
	client *kgo.Client

	mu        sync.Mutex
	committed []time.Time // by message; zero: not yet
	received  []time.Time
	missing   int
}

// latencies returns milliseconds, one for each message behind the warm-up. The relay is that of the last
// round: the backlog is behind it.
func (b *relayBench) latencies(ctx context.Context) (_ []float64, err error) {
	warmUp := int(latencyWarmUp.Seconds() * latencyPerSecond)
	n := warmUp + b.opts.LatencySeconds*latencyPerSecond
	b.note("publishing %d messages a second for %d seconds", latencyPerSecond, b.opts.LatencySeconds+int(latencyWarmUp.Seconds()))
	l := &latencyRun{relayBench: b, committed: make([]time.Time, n), received: make([]time.Time, n), missing: n}
	if l.topic, err = b.site.topic(ctx, "latency", b.opts.Partitions); err != nil {
		return nil, err
	}
	if l.outbox, err = outbox.New(outbox.Config{Schema: b.schema}); err != nil {
		return nil, err
	}
	if l.pool, err = b.newPool(ctx, latencyWriters+4); err != nil {
		return nil, err
	}
	defer l.pool.Close()
	if l.client, err = kgo.NewClient(kgo.SeedBrokers(b.Brokers...), kgo.ConsumeTopics(l.topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchMinBytes(1)); err != nil {
		return nil, fmt.Errorf("kafka options: %w", err)
	}
	defer l.client.Close()
	r, err := relay.New(l.pool, b.producer(), relay.Config{Schema: b.schema, Name: relayName(b.opts.Rounds - 1)})
	if err != nil {
		return nil, err
	}
	if err := l.run(ctx, r); err != nil {
		return nil, err
	}
	return l.milliseconds(warmUp), nil
}

func (l *latencyRun) run(ctx context.Context, r *relay.Relay) error {
	group, ctx := errgroup.WithContext(ctx)
	relaying, stop := context.WithCancel(ctx)
	group.Go(func() error { return r.Run(relaying) })
	group.Go(func() error { return l.publish(ctx) })
	group.Go(func() error {
		defer stop()
		return l.consume(ctx)
	})
	return group.Wait()
}

// publish starts a transaction every 2 ms, by a schedule that a slow one does not shift.
func (l *latencyRun) publish(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	due := make(chan int)
	group.Go(func() error {
		defer close(due)
		every := time.NewTicker(time.Second / latencyPerSecond)
		defer every.Stop()
		for i := range l.committed {
			select {
			case <-every.C:
			case <-ctx.Done():
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
	for range latencyWriters {
		group.Go(func() error {
			for i := range due {
				if err := l.publishOne(ctx, i); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return group.Wait()
}

func (l *latencyRun) publishOne(ctx context.Context, i int) error {
	payload := make([]byte, payloadBytes)
	binary.BigEndian.PutUint64(payload, uint64(i))
	err := pgx.BeginFunc(ctx, l.pool, func(tx pgx.Tx) error {
		return l.outbox.Publish(ctx, tx, outbox.Message{
			Topic: l.topic, Key: fmt.Appendf(nil, "account-%d", i%keysDistinct), Payload: payload,
		})
	})
	now := time.Now()
	if err != nil {
		return fmt.Errorf("publish: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.committed[i] = now
	return nil
}

// stallMax is how long nothing may arrive.
const stallMax = time.Minute

// consume polls until every message was received.
func (l *latencyRun) consume(ctx context.Context) error {
	for {
		polling, cancel := context.WithTimeout(ctx, stallMax)
		fetches := l.client.PollFetches(polling)
		now := time.Now()
		stalled := polling.Err() != nil && ctx.Err() == nil
		cancel()
		if stalled {
			return l.stall()
		}
		if err := errors.Join(ctx.Err(), fetches.Err()); err != nil {
			return fmt.Errorf("fetch: %w", err)
		}
		if done := l.receive(fetches.Records(), now); done {
			return nil
		}
	}
}

func (l *latencyRun) stall() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return fmt.Errorf("%d of %d messages did not arrive within %v: this is a bug, please report it", l.missing, len(l.received), stallMax)
}

func (l *latencyRun) receive(records []*kgo.Record, now time.Time) (done bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, record := range records {
		i := binary.BigEndian.Uint64(record.Value)
		if l.received[i].IsZero() { // the relay delivers at least once
			l.received[i] = now
			l.missing--
		}
	}
	return l.missing == 0
}

// milliseconds leaves the warm-up out. A record that arrived before its writer heard of the commit took
// no time.
func (l *latencyRun) milliseconds(warmUp int) []float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	latencies := make([]float64, 0, len(l.committed)-warmUp)
	for i := warmUp; i < len(l.committed); i++ {
		took := l.received[i].Sub(l.committed[i])
		latencies = append(latencies, max(0, took.Seconds()*1000))
	}
	return latencies
}
