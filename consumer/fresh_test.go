package consumer_test

import (
	"context"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// freshEngine makes an engine whose handler fails at a second effect of a message.
func freshEngine(t *testing.T, cfg consumer.Config) (*consumer.Engine, *consumer.Position, *pgxpool.Pool) {
	t.Helper()
	pool := pgtest.Pool(t)
	_, err := pool.Exec(t.Context(), "CREATE TABLE effects (value bytea PRIMARY KEY)")
	require.NoError(t, err)
	cfg.Group, cfg.Topics = "orders", []string{"orders"}
	engine := consumer.NewEngine(t, pool, consumer.Queued(func(_ context.Context, q *consumer.Queue, msg *consumer.Message) error {
		q.Queue("INSERT INTO effects VALUES ($1)", msg.Value)
		return nil
	}), cfg)
	at, err := engine.Hold(t.Context(), 0)
	require.NoError(t, err)
	return engine, at, pool
}

// numbers from one up to another.
func numbers(from, to int) (list []int) {
	for n := from; n < to; n++ {
		list = append(list, n)
	}
	return list
}

// even are those whose IDs carry no time and depend on nothing else.
func even(from, to int) []int {
	return slices.DeleteFunc(numbers(from, to), func(n int) bool { return n%2 != 0 })
}

// Property: whichever form a batch begins with, each message has its effect once and is reported
// once. A batch that was taken as fresh and has a duplicate of an earlier batch begins again and
// drops it, and the following batches ask. A message that is twice in one batch needs no second
// form.
func TestABatchTakenAsFreshDropsItsDuplicates(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]consumer.Config{
		"read committed":  {},
		"repeatable read": {Isolation: pgx.RepeatableRead},
		"serializable":    {Isolation: pgx.Serializable},
		"forever":         {Forever: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			engine, at, pool := freshEngine(t, cfg)
			offset, total := int64(0), 0
			apply := func(fresh, duplicates, asks int, numbers ...int) {
				t.Helper()
				out, err := engine.ApplyNumbers(t.Context(), at, offset, false, numbers...)
				require.NoError(t, err)
				require.Equal(t, consumer.Outcome{Fresh: fresh, Duplicates: duplicates}, out)
				require.Equal(t, asks, at.Asks())
				offset, total = offset+int64(len(numbers)), total+fresh
				var effects int
				require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM effects").Scan(&effects))
				require.Equal(t, total, effects)
			}
			apply(50, 2, 0, append(numbers(0, 50), 8, 8)...) // asks; the next batch need not ask
			apply(50, 0, 0, numbers(50, 100)...)             // is taken as fresh
			apply(50, 50, 0, append(numbers(100, 150), slices.Repeat([]int{148}, 50)...)...)
			apply(50, 1, 20, append(numbers(150, 200), 98)...) // is refused
			for i := range 20 {
				apply(20, 0, 19-i, numbers(200+20*i, 220+20*i)...) // ask
			}
			apply(50, 0, 0, numbers(600, 650)...)
			apply(0, 50, 20, even(0, 100)...)
			apply(1, 0, 19, 651) // too few to be worth it
		})
	}
}

// Property: a message whose claim may have been forgotten is parked as expired in a batch that is
// taken as fresh, too, however recently the mark moved.
func TestABatchTakenAsFreshHeedsTheMark(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			engine, at, pool := freshEngine(t, consumer.Config{Isolation: level})
			_, err := engine.ApplyNumbers(t.Context(), at, 0, false, numbers(0, 50)...)
			require.NoError(t, err)
			_, err = pool.Exec(t.Context(), "UPDATE effectonce.consumers SET forgotten_to = clock_timestamp() + interval '1 hour'")
			require.NoError(t, err)
			out, err := engine.ApplyNumbers(t.Context(), at, 50, false, numbers(50, 100)...)
			require.NoError(t, err)
			require.Equal(t, consumer.Outcome{Parked: 50}, out)
			require.Zero(t, at.Asks())
		})
	}
}

// Property: a worker whose connection leads to another server than its position commits nothing in
// a batch that is taken as fresh, either.
func TestABatchTakenAsFreshIsFencedByTheServer(t *testing.T) {
	t.Parallel()
	engine, at, pool := freshEngine(t, consumer.Config{})
	at.Trust()
	_, err := engine.ApplyNumbers(t.Context(), at, 0, true, numbers(0, 50)...)
	require.NoError(t, err)
	require.Zero(t, at.Asks())
	at.MoveServer()
	_, err = engine.ApplyNumbers(t.Context(), at, 50, true, numbers(50, 100)...)
	require.Error(t, err)
	assert.True(t, consumer.IsFenced(err), err)
	var effects int
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM effects").Scan(&effects))
	assert.Equal(t, 50, effects)
}
