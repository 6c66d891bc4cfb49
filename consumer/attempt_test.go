package consumer_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func (h *harness) smallPool(change func(*pgxpool.Config)) *pgxpool.Pool {
	h.t.Helper()
	config := h.pool.Config()
	config.MaxConns = 4
	if change != nil {
		change(config)
	}
	pool := pgtest.PoolOf(h.t, config)
	return pool
}

func (h *harness) produceEach(partition int32, values ...string) {
	h.t.Helper()
	for _, value := range values {
		h.produceRecord(&kgo.Record{Partition: partition, Value: []byte(value), Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte(uuid.Must(uuid.NewV7()).String())}}})
	}
}

// Property: a handler that hangs forever does not keep a connection of the pool: with a pool of
// four the other partitions continue, the message is parked after AttemptsMax attempts, the
// messages after it have their effects, and all connections are returned although the handlers
// still hang.
func TestHangingHandlerCostsOnlyItsMessage(t *testing.T) {
	longtest.Only(t, "a limit of half a second for each message")
	t.Parallel()
	for _, order := range []consumer.Order{consumer.OrderByPartition, consumer.OrderByKey, consumer.OrderUnordered} {
		t.Run(fmt.Sprint(order), func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 3)
			h.produceEach(0, "a", "hang", "b")
			h.produceEach(1, "c", "d")
			h.produceEach(2, "e", "f")
			leave := make(chan struct{})
			var hanging sync.WaitGroup
			var attempts atomic.Int64
			pool := h.smallPool(nil)
			stop := h.runOn(pool, consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
				if string(msg.Value) == "hang" {
					attempts.Add(1)
					hanging.Add(1)
					defer hanging.Done()
					<-leave
				}
				return effect(ctx, tx, msg)
			}), func(c *consumer.Config) {
				c.HandlerTimeout, c.AttemptsMax, c.Order, c.Workers = 500*time.Millisecond, 3, order, 0
			})
			defer func() {
				close(leave)
				hanging.Wait()
			}()
			h.wait("healthy partitions", func() bool {
				return h.number(`SELECT count(*) FROM effects WHERE value IN ('c', 'd', 'e', 'f')`) == 4
			})
			h.waitParked("failed")
			h.waitEffects(6)
			require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE convert_from(payload, 'UTF8') = 'hang' AND attempts = 3`))
			h.produceEach(0, "g")
			h.produceEach(1, "h")
			h.waitEffects(8)
			require.NoError(t, stop())
			pgtest.Unused(t, pool)
			require.LessOrEqual(t, attempts.Load(), int64(4), "the batch that found it, and AttemptsMax")
		})
	}
}

// Property: abandoned handlers are bounded: at the bound the partition begins no other attempt,
// reports that in the log and in its position, and continues by itself when one of them returns.
func TestAbandonedHandlersAreBounded(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 2)
	h.produceEach(0, "hang")
	leave := make(chan struct{})
	var running, most, calls atomic.Int64
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if string(msg.Value) == "hang" && calls.Add(1) <= 2 {
			most.Store(max(most.Load(), running.Add(1)))
			<-leave
			running.Add(-1)
		}
		return effect(ctx, tx, msg)
	}), func(c *consumer.Config) {
		c.HandlerTimeout, c.AttemptsMax, c.AbandonedMax = 200*time.Millisecond, 10, 2
	})
	const stored = `SELECT count(*) FROM effectonce.consumer_positions WHERE partition = 0 AND trouble LIKE '%too many handlers%'`
	h.wait("the position says so", func() bool { return h.number(stored) == 1 })
	require.Contains(t, h.log.String(), "too many handlers ignored the end of their context")
	require.Equal(t, int64(2), running.Load())
	require.Zero(t, h.number(`SELECT count(*) FROM effects`))
	leave <- struct{}{}
	h.waitEffects(1)
	h.wait("the position says so no more", func() bool { return h.number(stored) == 0 })
	require.Equal(t, int64(2), most.Load())
	leave <- struct{}{}
	h.wait("returned", func() bool { return running.Load() == 0 })
	require.NoError(t, stop())
	require.Empty(t, h.parked())
	require.Contains(t, h.log.String(), "partition works again")
}
