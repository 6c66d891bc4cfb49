package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/outbox"
)

// four makes a pool have four connections.
func four(config *pgxpool.Config) { config.MaxConns = 4 }

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
			pool := h.poolWith(four)
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
			h.waitNumber(4, `SELECT count(*) FROM effects WHERE value IN ('c', 'd', 'e', 'f')`)
			h.waitEffects(6)
			h.waitNumber(1, `SELECT count(*) FROM effectonce.parked_messages WHERE convert_from(payload, 'UTF8') = 'hang' AND attempts = 3 AND state = 'parked'`)
			h.produceEach(0, "g")
			h.produceEach(1, "h")
			h.untilEffects(8, stop)
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
			if err := outbox.Publish(ctx, tx, outbox.Message{Topic: "next"}); err != nil {
				return err
			}
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

// commitTracer panics where the answer to COMMIT is read, as user code in a tracer may.
type commitTracer struct {
	pgtest.Statements // which does nothing

	left *atomic.Int32
}

type commitKey struct{}

func (c commitTracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	queries := data.Batch.QueuedQueries
	return context.WithValue(ctx, commitKey{}, queries[len(queries)-1].SQL == "COMMIT")
}

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
	each(t, dedups, func(t *testing.T, h *harness, _ string, dedup consumer.Dedup) {
		t.Helper()
		var left atomic.Int32
		left.Store(3)
		pool := h.poolWith(func(config *pgxpool.Config) { config.ConnConfig.Tracer = commitTracer{func(string) {}, &left} })
		h.produce("a", "b", "c", "d", "e")
		h.untilHandled(5, h.runOn(pool, consumer.Each(effect), func(c *consumer.Config) { c.Dedup, c.BatchMax = dedup, 1 }))
		require.Negative(t, left.Load(), "the tracer panicked three times")
		require.Equal(t, []string{"a", "b", "c", "d", "e"}, h.values())
		require.Empty(t, h.parked())
	})
}

// Property: Deliver with workers ends when another holder takes the partition, and does not take
// the partition back.
func TestDeliverWithWorkersEndsWhenItIsFenced(t *testing.T) {
	t.Parallel()
	each(t, workerOrders, func(t *testing.T, h *harness, _ string, order consumer.Order) {
		t.Helper()
		c := h.make(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			_, err := h.pool.Exec(ctx, `UPDATE effectonce.consumer_positions SET epoch = epoch + 1, owner = 'another'`)
			if err != nil {
				return err
			}
			return effect(ctx, tx, msg)
		}), func(c *consumer.Config) { c.Order, c.Workers = order, 2 })
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		_, err := c.Deliver(ctx, &kgo.Record{Topic: h.topic, Offset: 0, Value: []byte("a"), Timestamp: time.Now(), Key: []byte("k")})
		require.Error(t, err)
		require.NoError(t, ctx.Err(), "it ended by itself")
		require.Equal(t, 2, h.number(`SELECT epoch FROM effectonce.consumer_positions`), "taken once, and by the other one")
		require.Empty(t, h.values())
	})
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

type tenantKey struct{}

// Property: middleware runs around every shape of handler, the first one outermost, and passes its
// context on; it cannot turn a failure into a success, nor lose or double an effect by not calling
// next or by calling it twice.
func TestMiddlewareRunsAroundHandlers(t *testing.T) {
	t.Parallel()
	var calls *list
	note := func(name string) consumer.Middleware {
		return consumer.Around(func(ctx context.Context, _ pgx.Tx, msgs []*consumer.Message, next func(context.Context) error) error {
			calls.add(name)
			return next(context.WithValue(ctx, tenantKey{}, string(msgs[0].Value)))
		})
	}
	queued := consumer.Queued(func(ctx context.Context, q *consumer.Queue, msg *consumer.Message) error {
		q.Queue(`INSERT INTO effects (message_id, value) VALUES ($1, $2)`, [16]byte(msg.ID), ctx.Value(tenantKey{}).(string)+"/"+string(msg.Value))
		return nil
	})
	each := consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		_, err := tx.Exec(ctx, `INSERT INTO effects (message_id, value) VALUES ($1, $2)`, [16]byte(msg.ID), ctx.Value(tenantKey{}).(string)+"/"+string(msg.Value))
		return err
	})
	for name, handler := range map[string]consumer.Handler{"each": each, "queued": queued} {
		h := newHarness(t, 1)
		calls = &list{}
		h.produce("a", "b", "c")
		h.untilEffects(3, h.run(handler, func(c *consumer.Config) { c.Middleware = []consumer.Middleware{note("outer"), note("inner")} }))
		if name == "each" {
			require.Equal(t, []string{"a/a", "b/b", "c/c"}, h.values())
			require.Equal(t, strings.Repeat("outer inner ", 3), strings.Join(calls.all(), " ")+" ")
			continue
		}
		require.Len(t, h.values(), 3)
		require.Equal(t, "outer", calls.all()[0])
		require.Len(t, calls.all(), 2*calls.count("inner"))
	}
}

// Property: see above. If a middleware does not wait for the handler, the engine does.
func TestMiddlewareCannotLoseOrDoubleAnEffect(t *testing.T) {
	t.Parallel()
	type call func(ctx context.Context, next func(context.Context) error) error
	const afterwards = "calls next when it is over"
	var later sync.WaitGroup
	each(t, map[string]call{
		"does not call next": func(context.Context, func(context.Context) error) error { return nil },
		"calls next twice": func(ctx context.Context, next func(context.Context) error) error {
			return errors.Join(next(ctx), next(ctx))
		},
		"ignores that next was called twice": func(ctx context.Context, next func(context.Context) error) error {
			_, _ = next(ctx), next(ctx)
			return nil
		},
		"panics behind next": func(ctx context.Context, next func(context.Context) error) error {
			_ = next(ctx)
			panic("boom")
		},
		"fails behind next": func(ctx context.Context, next func(context.Context) error) error {
			_ = next(ctx)
			return errBad
		},
		"swallows what next says": func(ctx context.Context, next func(context.Context) error) error {
			_ = next(ctx)
			return nil
		},
		"returns before next": func(ctx context.Context, next func(context.Context) error) error {
			begun := make(chan struct{})
			go func() { _ = next(context.WithValue(ctx, tenantKey{}, begun)) }()
			<-begun
			return nil
		},
		afterwards: func(ctx context.Context, next func(context.Context) error) error {
			later.Go(func() {
				<-ctx.Done()
				_ = next(ctx)
			})
			return nil
		},
	}, func(t *testing.T, h *harness, name string, around call) {
		t.Helper()
		h.produce("a", "bad", "c")
		h.untilHandled(3, h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			if begun, ok := ctx.Value(tenantKey{}).(chan struct{}); ok {
				close(begun)
			}
			if err := effect(ctx, tx, msg); err != nil || string(msg.Value) != "bad" {
				return err
			}
			if name == "swallows what next says" {
				return errBad
			}
			_, err := tx.Exec(ctx, `SELECT pg_sleep(0.2)`)
			return err
		}), func(c *consumer.Config) {
			parkAll(c)
			c.AttemptsMax = 2
			c.Middleware = []consumer.Middleware{consumer.Around(func(ctx context.Context, _ pgx.Tx, msgs []*consumer.Message, next func(context.Context) error) error {
				if string(msgs[0].Value) == "bad" {
					return around(ctx, next)
				}
				return next(ctx)
			})}
		}))
		if name == afterwards {
			later.Wait()
		}
		require.Equal(t, []string{"a", "c"}, h.values())
		why := "permanent"
		switch name {
		case "panics behind next", "fails behind next", "swallows what next says":
			why = "failed"
		}
		require.Equal(t, []string{"bad " + why + " parked"}, h.parked())
	})
}

// Property: by position, a message that ends its session in COMMIT is found and parked, as by ID. Row C18
// of guarantees.md.
func TestMessageThatEndsItsSessionInCommitIsFound(t *testing.T) {
	t.Parallel()
	each(t, dedups, func(t *testing.T, h *harness, _ string, level consumer.Dedup) {
		t.Helper()
		h.produce("ok", "a", "b")
		h.exec(`CREATE FUNCTION cut() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.value = 'a' THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF; RETURN NULL; END $$;
			CREATE CONSTRAINT TRIGGER cut AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION cut()`)
		stop := h.run(consumer.Each(effect), func(c *consumer.Config) { c.Dedup, c.AttemptsMax = level, 3 })
		h.wait("parked", func() bool {
			return h.number(`SELECT count(*) FROM effects WHERE value <> 'a'`) == 2 && h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE state = 'parked'`) == 1
		})
		require.NoError(t, stop())
		require.Len(t, h.parked(), 1)
	})
}
