package consumer_test

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: no function of the user ends the process or the partition, whether it panics, ends its
// goroutine, or returns an error whose methods panic: the message is parked, the others have their
// effects once.
func TestUserFunctionsAreGuarded(t *testing.T) {
	t.Parallel()
	breaks := map[string]func(){"panic": func() { panic("boom") }, "goexit": runtime.Goexit}
	bad := func(msg *consumer.Message) bool { return strings.HasPrefix(string(msg.Value), "bad") }
	decoder := func(broken func()) consumer.Decoder[string] {
		return consumer.DecoderFunc[string](func(msg *consumer.Message) (string, error) {
			if bad(msg) {
				broken()
			}
			return string(msg.Value), nil
		})
	}
	around := func(before, after func()) consumer.Middleware {
		return consumer.Around(func(ctx context.Context, _ pgx.Tx, msgs []*consumer.Message, next func(context.Context) error) error {
			if bad(msgs[0]) {
				before()
			}
			err := next(ctx)
			if bad(msgs[0]) {
				after()
			}
			return err
		})
	}
	nothing := func() {}
	places := map[string]func(broken func()) (consumer.Handler, consumer.Middleware){
		"callback of a queued statement": func(broken func()) (consumer.Handler, consumer.Middleware) {
			return consumer.Queued(func(_ context.Context, q *consumer.Queue, msg *consumer.Message) error {
				q.Queue(`INSERT INTO effects (message_id, value) VALUES ($1, $2)`, [16]byte(msg.ID), string(msg.Value))
				if bad(msg) {
					q.Queue(`SELECT 1`).QueryRow(func(pgx.Row) error { broken(); return nil })
				}
				return nil
			}), nil
		},
		"decoder": func(broken func()) (consumer.Handler, consumer.Middleware) {
			return consumer.Decode(decoder(broken), func(ctx context.Context, tx pgx.Tx, msg *consumer.Message, _ string) error {
				return effect(ctx, tx, msg)
			}), nil
		},
		"middleware, before": func(broken func()) (consumer.Handler, consumer.Middleware) {
			return consumer.Each(effect), around(broken, nothing)
		},
		"middleware, after": func(broken func()) (consumer.Handler, consumer.Middleware) {
			return consumer.Each(effect), around(nothing, broken)
		},
	}
	for _, shape := range []string{"each", "queued", "batch"} {
		places[shape] = func(broken func()) (consumer.Handler, consumer.Middleware) {
			return shapes(func(msg *consumer.Message) error {
				if bad(msg) {
					broken()
				}
				return nil
			})[shape], nil
		}
	}
	for place, handlerOf := range places {
		for how, broken := range breaks {
			t.Run(place+", "+how, func(t *testing.T) {
				t.Parallel()
				h := newHarness(t, 1)
				h.produce("1", "2", "bad", "3", "4")
				handler, middleware := handlerOf(broken)
				stop := h.run(handler, func(c *consumer.Config) {
					c.AttemptsMax = 2
					if middleware != nil {
						c.Middleware = []consumer.Middleware{middleware}
					}
				})
				h.wait("position", func() bool { return h.position() == 5 })
				require.NoError(t, stop())
				require.Equal(t, []string{"1", "2", "3", "4"}, h.values())
				require.Len(t, h.parked(), 1)
				require.Contains(t, h.parked()[0], "bad ")
			})
		}
	}
}

// Property: see above, for errors whose methods panic.
func TestErrorsThatPanicAreGuarded(t *testing.T) {
	t.Parallel()
	for _, method := range []string{"Error", "Unwrap", "Is"} {
		h := newHarness(t, 1)
		h.produce("1", "bad", "2")
		stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			if string(msg.Value) == "bad" {
				return panickingError{method}
			}
			return effect(ctx, tx, msg)
		}), func(c *consumer.Config) { c.AttemptsMax = 2 })
		h.wait("position", func() bool { return h.position() == 3 })
		require.NoError(t, stop())
		require.Equal(t, []string{"1", "2"}, h.values())
		require.Equal(t, []string{"bad failed parked"}, h.parked())
		require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE error LIKE '%in '||$1||'%'`, method))
	}
}

// Property: a hook that panics, ends its goroutine or does not return causes a log line and affects
// no message: with one goroutine for each partition, and with workers.
func TestHooksAreGuarded(t *testing.T) {
	t.Parallel()
	forever := make(chan struct{})
	t.Cleanup(func() { close(forever) })
	for how, tc := range map[string]struct {
		broken func()
		says   string
	}{
		"panic": {func() { panic("boom") }, "boom"}, "goexit": {runtime.Goexit, "Goexit"}, "hang": {func() { <-forever }, "did not return"},
	} {
		for _, order := range []consumer.Order{consumer.OrderByPartition, consumer.OrderByKey, consumer.OrderUnordered} {
			t.Run(fmt.Sprint(how, order), func(t *testing.T) {
				t.Parallel()
				if how == "hang" {
					longtest.Only(t, "limits of real seconds")
				}
				h := newHarness(t, 1)
				h.produceKeyed("a:1", "b:bad", "c:1")
				var hooks atomic.Int64
				stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
					if strings.HasSuffix(string(msg.Value), "bad") {
						return errBad
					}
					return effect(ctx, tx, msg)
				}), func(c *consumer.Config) {
					c.Order, c.AttemptsMax, c.AbandonedMax = order, 2, 100
					c.Hooks.Processed = func(consumer.Processed) { hooks.Add(1); tc.broken() }
					c.Hooks.Failed = func(consumer.Failed) { hooks.Add(1); tc.broken() }
					c.Hooks.Parked = func(consumer.Parked) { hooks.Add(1); tc.broken() }
				})
				h.wait("position", func() bool { return h.position() == 3 })
				h.produceKeyed("d:1")
				h.wait("position", func() bool { return h.position() == 4 })
				require.NoError(t, stop())
				require.Len(t, h.values(), 3)
				require.Len(t, h.parked(), 1)
				if how == "hang" { // no other is called meanwhile
					require.GreaterOrEqual(t, hooks.Load(), int64(1))
				} else {
					require.GreaterOrEqual(t, hooks.Load(), int64(4))
				}
				require.Contains(t, h.log.String(), tc.says)
			})
		}
	}
}

// Property: if a middleware does not wait for the handler, its transaction is not committed: the
// engine waits, and parks the message for the middleware's mistake.
func TestMiddlewareThatDoesNotWaitIsFound(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(ctx context.Context, next func(context.Context) error, later *sync.WaitGroup) error{
		"returns before next": func(ctx context.Context, next func(context.Context) error, _ *sync.WaitGroup) error {
			begun := make(chan struct{})
			go func() { _ = next(context.WithValue(ctx, tenantKey{}, begun)) }()
			<-begun
			return nil
		},
		"calls next when it is over": func(ctx context.Context, next func(context.Context) error, later *sync.WaitGroup) error {
			later.Go(func() {
				<-ctx.Done()
				_ = next(ctx)
			})
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			var later sync.WaitGroup
			h.produce("1", "bad", "2")
			stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
				if begun, ok := ctx.Value(tenantKey{}).(chan struct{}); ok {
					close(begun)
				}
				if err := effect(ctx, tx, msg); err != nil {
					return err
				}
				_, err := tx.Exec(ctx, `SELECT pg_sleep(0.2)`)
				return err
			}), func(c *consumer.Config) {
				c.AttemptsMax = 2
				c.Middleware = []consumer.Middleware{consumer.Around(func(ctx context.Context, _ pgx.Tx, msgs []*consumer.Message, next func(context.Context) error) error {
					if string(msgs[0].Value) == "bad" {
						return call(ctx, next, &later)
					}
					return next(ctx)
				})}
			})
			h.wait("position", func() bool { return h.position() == 3 })
			require.NoError(t, stop())
			later.Wait()
			require.Equal(t, []string{"1", "2"}, h.values())
			require.Equal(t, []string{"bad permanent parked"}, h.parked())
		})
	}
}

// Property: if a handler returns while a goroutine of its own still runs a statement, its message
// is parked for that, and neither the process nor the pool is harmed: the connection is not used by
// two goroutines.
func TestStatementThatOutlivesItsHandlerIsFound(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	var late sync.WaitGroup
	h.produce("1", "bad", "2")
	pool := h.smallPool(nil)
	stop := h.runOn(pool, consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if string(msg.Value) != "bad" {
			return effect(ctx, tx, msg)
		}
		pid := int64(tx.Conn().PgConn().PID())
		late.Go(func() { _, _ = tx.Exec(context.WithoutCancel(ctx), `SELECT pg_sleep(60)`) })
		for asleep := false; !asleep; {
			if err := h.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'PgSleep')`, pid).Scan(&asleep); err != nil {
				return err
			}
		}
		return nil
	}), nil)
	h.wait("position", func() bool { return h.position() == 3 })
	require.NoError(t, stop())
	late.Wait()
	require.Equal(t, []string{"1", "2"}, h.values())
	require.Equal(t, []string{"bad permanent parked"}, h.parked())
	pgtest.Unused(t, pool)
}
