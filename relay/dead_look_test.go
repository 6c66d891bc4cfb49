package relay_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// Property: a row that the relay moves behind a dead one is published also where an operator
// discards that one at the same moment, before the row is there: neither waits for the other, and
// no later look at the whole table is needed.
func TestRowBehindOneThatIsDiscardedMeanwhile(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload, headers) VALUES ($1, 'k', '1', '{"n": {}}')`, topic)
		drain(t, newRelay(t, pool, relay.Config{ExactlyOnce: exactly}))
		require.Equal(t, 1, dead(t, pool))
		operator, err := pool.Begin(ctx)
		require.NoError(t, err)
		defer operator.Rollback(context.WithoutCancel(ctx))
		var once atomic.Bool
		running(t, traced(t, pool, &between{"-- relay.move_to_dead", func(ctx context.Context) {
			if once.CompareAndSwap(false, true) {
				if _, err := operator.Exec(ctx, `DELETE FROM effectonce.outbox_dead`); err != nil {
					t.Error(err)
				}
			}
		}}), relay.Config{ExactlyOnce: exactly})
		insert(t, pool, topic, "k", "2")
		testwait.True(t, "the row waits", func() bool { return dead(t, pool) == 2 })
		require.NoError(t, operator.Commit(ctx))
		testwait.True(t, "it is published", func() bool { return len(values(t, topic)) == 1 && dead(t, pool) == 0 })
		testwait.True(t, "nothing is left of it", func() bool { return one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_dead_freed`) == 0 })
	})
}

// Property: the rows of a topic that is resumed are handed back in bounded batches, each when the
// one before is published.
func TestResumedTopicIsHandedBackInBatches(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	const waiting = 2*relay.HandBackMax + 10
	must(t, pool, `SELECT setval('effectonce.outbox_seq_seq', $1)`, waiting)
	must(t, pool, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, payload, headers, created_at, reason, error, state)
		SELECT 'default', i, effectonce.uuid_v7(), $1, convert_to(i::text, 'UTF8'), '{}', clock_timestamp(), 'paused', '', 'held' FROM generate_series(1, $2::int) AS i`, topic, waiting)
	var most atomic.Int64
	counted := traced(t, pool, &between{"-- relay.releasable", func(ctx context.Context) {
		var n int64
		if err := pool.QueryRow(ctx, `SELECT count(*) FROM effectonce.outbox_dead WHERE state = 'retry'`).Scan(&n); err != nil {
			t.Error(err)
		}
		most.Store(max(n, most.Load()))
	}})
	drain(t, newRelay(t, counted, relay.Config{}))
	require.Len(t, values(t, topic), waiting)
	require.Zero(t, dead(t, pool))
	require.EqualValues(t, relay.HandBackMax, most.Load())
}

// Property: rows of a key that were handed back behind one that is held wait, and do not keep
// others waiting.
func TestRowsThatMayNotLeaveHoldNoOther(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	must(t, pool, `SELECT setval('effectonce.outbox_seq_seq', 2001)`)
	must(t, pool, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, payload, headers, created_at, reason, error, state)
		SELECT 'default', i, effectonce.uuid_v7(), $1, CASE WHEN i < 2000 THEN convert_to('k' || i % 5, 'UTF8') ELSE 'l' END, convert_to(i::text, 'UTF8'), '{}', clock_timestamp(), 'refused', '',
			CASE WHEN i <= 5 THEN 'held' ELSE 'retry' END FROM generate_series(1, 2001) AS i`, topic)
	drain(t, newRelay(t, pool, relay.Config{}))
	require.Equal(t, []string{"2000", "2001"}, values(t, topic))
	must(t, pool, `UPDATE effectonce.outbox_dead SET state = 'retry' WHERE seq = 3`)
	drain(t, newRelay(t, pool, relay.Config{}))
	require.Len(t, keyed(t, topic, "k3"), 400)
	require.Len(t, values(t, topic), 402)
	require.Equal(t, "3", keyed(t, topic, "k3")[0])
}
