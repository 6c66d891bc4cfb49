package consumer_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/consumer"
)

type tenantKey struct{}

// Property: middleware runs around every shape of handler, the first one outermost, and passes its
// context on; it cannot turn a failure into a success, nor lose or double an effect by not calling
// next or by calling it twice.
func TestMiddlewareRunsAroundHandlers(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var calls []string
	note := func(name string) consumer.Middleware {
		return consumer.Around(func(ctx context.Context, msgs []*consumer.Message, next func(context.Context) error) error {
			mu.Lock()
			calls = append(calls, name)
			mu.Unlock()
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
		calls = nil
		h.produce("a", "b", "c")
		stop := h.run(handler, func(c *consumer.Config) { c.Middleware = []consumer.Middleware{note("outer"), note("inner")} })
		h.waitEffects(3)
		require.NoError(t, stop())
		if name == "each" {
			require.Equal(t, []string{"a/a", "b/b", "c/c"}, h.values())
			require.Equal(t, strings.Repeat("outer inner ", 3), strings.Join(calls, " ")+" ")
			continue
		}
		require.Len(t, h.values(), 3)
		require.Equal(t, "outer", calls[0])
		require.Equal(t, len(calls), 2*len(slices.DeleteFunc(slices.Clone(calls), func(s string) bool { return s != "inner" })))
	}
}

// Property: see above.
func TestMiddlewareCannotLoseOrDoubleAnEffect(t *testing.T) {
	t.Parallel()
	for name, around := range map[string]func(ctx context.Context, msgs []*consumer.Message, next func(context.Context) error) error{
		"does not call next": func(context.Context, []*consumer.Message, func(context.Context) error) error { return nil },
		"calls next twice": func(ctx context.Context, _ []*consumer.Message, next func(context.Context) error) error {
			return errors.Join(next(ctx), next(ctx))
		},
		"ignores that next was called twice": func(ctx context.Context, _ []*consumer.Message, next func(context.Context) error) error {
			_, _ = next(ctx), next(ctx)
			return nil
		},
		"panics behind next": func(ctx context.Context, _ []*consumer.Message, next func(context.Context) error) error {
			_ = next(ctx)
			panic("boom")
		},
		"fails behind next": func(ctx context.Context, _ []*consumer.Message, next func(context.Context) error) error {
			_ = next(ctx)
			return errBad
		},
		"swallows what next says": func(ctx context.Context, _ []*consumer.Message, next func(context.Context) error) error {
			_ = next(ctx)
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			h.produce("a", "bad", "c")
			stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
				if err := effect(ctx, tx, msg); err != nil {
					return err
				}
				if name == "swallows what next says" && string(msg.Value) == "bad" {
					return errBad
				}
				return nil
			}), func(c *consumer.Config) {
				parkAll(c)
				c.AttemptsMax = 2
				c.Middleware = []consumer.Middleware{consumer.Around(func(ctx context.Context, msgs []*consumer.Message, next func(context.Context) error) error {
					if string(msgs[0].Value) == "bad" {
						return around(ctx, msgs, next)
					}
					return next(ctx)
				})}
			})
			h.wait("position", func() bool { return h.position() == 3 })
			require.NoError(t, stop())
			require.Equal(t, []string{"a", "c"}, h.values())
			require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.parked_messages`))
		})
	}
}
