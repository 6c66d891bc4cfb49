package consumer_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
)

// Property: a fresh claim in the range that the consumer has handled was forgotten: the message is
// parked as expired and not run. Before and after that range it is run. Consumers that never
// forget, and those without claims, park none.
func TestFreshWhereAllWasWorkedThroughIsNotRun(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		settings      func(*consumer.Config)
		apart         bool
		fresh, parked int
	}{
		"by ID":       {func(*consumer.Config) {}, false, 5, 5},
		"a worker":    {parallel(consumer.OrderByKey), true, 5, 5},
		"unordered":   {parallel(consumer.OrderUnordered), true, 5, 5},
		"for ever":    {func(c *consumer.Config) { c.Forever = true }, false, 10, 0},
		"by position": {func(c *consumer.Config) { c.Dedup = consumer.DedupByPosition }, false, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			cfg := consumer.Config{Group: "g", Topics: []string{h.topic}}
			c.settings(&cfg)
			cfg.BatchMax = 500
			engine := consumer.NewEngine(t, h.pool, consumer.Each(effect), cfg)
			at, err := engine.Hold(t.Context(), 0)
			require.NoError(t, err)
			fresh, err := engine.Apply(t.Context(), at, 0, 10)
			require.NoError(t, err)
			require.Equal(t, 10, fresh)
			h.exec(`DELETE FROM effectonce.processed_messages`)
			h.exec(`DELETE FROM effectonce.processed_forever`)
			at.HandledFrom(5)
			apply := engine.Apply
			if c.apart {
				apply = engine.ApplyApart
			}
			fresh, err = apply(t.Context(), at, 0, 10)
			require.NoError(t, err)
			require.Equal(t, c.fresh, fresh)
			require.Equal(t, c.parked, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE reason = 'expired' AND "offset" BETWEEN 5 AND 9`))
			fresh, err = apply(t.Context(), at, 10, 5)
			require.NoError(t, err)
			require.Equal(t, 5, fresh, "behind the position")
			require.Equal(t, c.parked, h.number(`SELECT count(*) FROM effectonce.parked_messages`))
		})
	}
}

// Property: the position of workers is the end of the messages done without a gap, in whatever
// order they are done and whatever offsets are missing.
func TestPositionOfWorkersFollowsTheLowestInWork(t *testing.T) {
	t.Parallel()
	for seed := range uint64(50) {
		random := rand.New(rand.NewPCG(seed, 1))
		var tracker consumer.Tracker
		var open []int64
		next, want := int64(random.IntN(3)), int64(0)
		for range 400 {
			if random.IntN(2) == 0 {
				next += 1 + int64(random.IntN(3))
				tracker.Add(next)
				open = append(open, next)
				continue
			}
			if len(open) == 0 {
				continue
			}
			i := random.IntN(len(open))
			done := open[i]
			open = append(open[:i], open[i+1:]...)
			tracker.Done(done)
			if len(open) == 0 {
				want = next + 1
			} else if i == 0 {
				want = 0 // behind the last that is done before open[0]: judged below
			}
			low := tracker.Low()
			if want > 0 {
				require.Equal(t, want, low)
			}
			if len(open) > 0 {
				require.LessOrEqual(t, low, open[0], "seed %d", seed)
				want = 0
			}
			require.Equal(t, len(open) == 0, tracker.Idle())
		}
	}
}

// Property: the messages that wait in memory are bounded, headers included, for the lane and for
// its workers. Records before the start that an earlier fetch returns are dropped.
func TestHeadersCountForWhatWaits(t *testing.T) {
	t.Parallel()
	client := kafkatest.Client(t)
	large := func(offset int64) *kgo.Record {
		return &kgo.Record{Offset: offset, Headers: []kgo.RecordHeader{{Key: "h", Value: make([]byte, 1<<20)}}}
	}
	w := consumer.NewWaiting(client, "t", 5)
	w.Arrive(large(3), large(4))
	require.Empty(t, w.Next())
	for offset := range int64(15) {
		w.Arrive(large(5 + offset))
	}
	require.False(t, w.Paused())
	w.Arrive(large(20))
	require.True(t, w.Paused())
	require.Len(t, w.Next(), 16)
	require.False(t, w.Paused())
	require.True(t, w.Full())
	w.Take()
	require.False(t, w.Full())
}

// Property: parked messages that are retried are read in bounded memory, with their headers.
func TestHeadersCountForWhatIsRetried(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	var largest, handled atomic.Int64
	handler := consumer.Batch(func(_ context.Context, _ pgx.Tx, msgs []*consumer.Message) error {
		size := int64(0)
		for _, msg := range msgs {
			for _, header := range msg.Headers {
				size += int64(len(header.Value))
			}
		}
		largest.Store(max(largest.Load(), size))
		handled.Add(int64(len(msgs)))
		return nil
	})
	stop := h.run(handler, nil)
	h.wait("the name", func() bool { return h.number(`SELECT count(*) FROM effectonce.consumers`) == 1 })
	h.exec(fmt.Sprintf(`INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", headers, record_time, reason, error, state)
		SELECT (SELECT id FROM effectonce.consumers), gen_random_uuid(), '%s', 0, n, jsonb_build_object('h', repeat('x', 1 << 20)), now(), 'failed', 'e', 'retry' FROM generate_series(0, 39) n`, h.topic))
	h.wait("retried", func() bool { return handled.Load() == 40 })
	require.NoError(t, stop())
	require.LessOrEqual(t, largest.Load(), int64(16<<20))
	require.Empty(t, h.parked())
}
