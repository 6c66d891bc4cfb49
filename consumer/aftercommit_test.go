package consumer_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// commitTracer panics where the answer to COMMIT is read, as user code in a tracer may.
type commitTracer struct{ left *atomic.Int32 }

type commitKey struct{}

func (c commitTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (c commitTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (c commitTracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	queries := data.Batch.QueuedQueries
	return context.WithValue(ctx, commitKey{}, queries[len(queries)-1].SQL == "COMMIT")
}

func (c commitTracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (c commitTracer) TraceBatchEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchEndData) {
	if commits, _ := ctx.Value(commitKey{}).(bool); commits && c.left.Add(-1) >= 0 {
		panic("tracer")
	}
}

// Property: a panic after COMMIT leaves the outcome unknown, like a lost connection: the position
// or the claims resolve it, no effect is doubled and no message is parked. Rows C20, C43 of
// guarantees.md.
func TestPanicBehindCommitDoublesNothing(t *testing.T) {
	t.Parallel()
	for name, dedup := range map[string]consumer.Dedup{"by position": consumer.DedupByPosition, "by id": consumer.DedupByID} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			var left atomic.Int32
			left.Store(3)
			config := h.pool.Config()
			config.ConnConfig.Tracer = commitTracer{&left}
			pool := pgtest.PoolOf(t, config)
			h.produce("a", "b", "c", "d", "e")
			stop := h.runOn(pool, consumer.Each(effect), func(c *consumer.Config) { c.Dedup, c.BatchMax = dedup, 1 })
			h.wait("the position", func() bool { return h.position() == 5 })
			require.NoError(t, stop())
			require.Negative(t, left.Load(), "the tracer panicked three times")
			require.Equal(t, []string{"a", "b", "c", "d", "e"}, h.values())
			require.Empty(t, h.parked())
		})
	}
}

// Property: Deliver with workers ends when another holder takes the partition, and does not take
// the partition back.
func TestDeliverWithWorkersEndsWhenItIsFenced(t *testing.T) {
	t.Parallel()
	for name, order := range map[string]consumer.Order{"by key": consumer.OrderByKey, "unordered": consumer.OrderUnordered} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			cfg := consumer.Config{Group: h.topic, Topics: []string{h.topic}, Order: order, Workers: 2, RetryMin: time.Millisecond, RetryMax: 10 * time.Millisecond}
			c, err := consumer.New(h.pool, nil, consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
				_, err := h.pool.Exec(ctx, `UPDATE effectonce.consumer_positions SET epoch = epoch + 1, owner = 'another'`)
				if err != nil {
					return err
				}
				return effect(ctx, tx, msg)
			}), cfg)
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			_, err = c.Deliver(ctx, &kgo.Record{Topic: h.topic, Offset: 0, Value: []byte("a"), Timestamp: time.Now(), Key: []byte("k")})
			require.Error(t, err)
			require.NoError(t, ctx.Err(), "it ended by itself")
			require.Equal(t, 2, h.number(`SELECT epoch FROM effectonce.consumer_positions`), "taken once, and by the other one")
			require.Empty(t, h.values())
		})
	}
}

// Property: a holder whose connection leads to another server than the one that it took its
// position over on commits nothing there, whatever epoch and position that server knows: a failover
// may have given the epoch out again.
func TestHolderOfAnotherServerIsFenced(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	engine := consumer.NewEngine(t, h.pool, consumer.Each(effect), consumer.Config{Group: "g", Topics: []string{h.topic}})
	at, err := engine.Hold(t.Context(), 0)
	require.NoError(t, err)
	_, err = engine.Apply(t.Context(), at, 0, 5)
	require.NoError(t, err)
	consumer.OfAnotherServer(at)
	for _, n := range []int{5, 50} { // asked for, and taken as fresh
		_, err = engine.Apply(t.Context(), at, 5, n)
		require.True(t, consumer.IsFenced(err), "%v", err)
	}
	require.Equal(t, 5, h.number(`SELECT count(*) FROM effects`))
}
