package relay_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/relay"
)

// readOfDeadSQL is how many entries of indexes and rows of outbox_dead were read, as the server
// counts them.
const readOfDeadSQL = `SELECT coalesce(t.seq_tup_read, 0) + coalesce(t.idx_tup_fetch, 0) +
	(SELECT coalesce(sum(i.idx_tup_read), 0) FROM pg_stat_user_indexes i WHERE i.relid = t.relid)::bigint
	FROM pg_stat_user_tables t WHERE t.relid = 'effectonce.outbox_dead'::regclass`

// Property: rows that wait for a missing topic, or for a paused one, cost the relay nothing, while
// it looks for released ones and publishes another topic: what it reads of outbox_dead does not
// depend on how many there are. Row O41 of guarantees.md.
func TestWaitingRowsAreNotRead(t *testing.T) {
	longtest.Only(t, "it counts reads in real time")
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		few, many := readOfDead(t, exactly, 10), readOfDead(t, exactly, 10_000)
		t.Log("10 rows of each topic:", few, "10,000:", many)
		require.LessOrEqual(t, many, few+100) // a statement whose plan or time differs reads a handful
	})
}

// readOfDead is what a relay reads of outbox_dead in five looks, in which it publishes five pages
// of a topic without dead rows.
func readOfDead(t *testing.T, exactly bool, waiting int) int64 {
	t.Helper()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	must(t, pool, `ALTER TABLE effectonce.outbox_dead SET (autovacuum_enabled = off)`) // which reads, too
	must(t, pool, waitingSQL, waiting)
	_, err := relay.Pause(ctx, pool, relay.Operator{Who: "ana", Why: "test"}, "paused")
	require.NoError(t, err)
	must(t, pool, `SELECT pg_stat_force_next_flush()`)
	var looks, probes atomic.Int64
	counted := traced(t, pool, tracers{
		&between{"-- relay.released", func(context.Context) { looks.Add(1) }},
		&between{"-- relay.holding", func(context.Context) { probes.Add(1) }},
	})
	cfg := relay.Config{ExactlyOnce: exactly}
	drain(t, newRelay(t, counted, cfg))
	must(t, pool, `SELECT pg_stat_reset_single_table_counters(c.oid) FROM pg_class c
		WHERE c.oid = 'effectonce.outbox_dead'::regclass OR c.oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = 'effectonce.outbox_dead'::regclass)`)
	stop := running(t, counted, cfg)
	for i := range 5 {
		before := looks.Load()
		insert(t, pool, topic, "k", fmt.Sprint(i))
		await(t, "the row is published and the relay looks", func() bool { return len(values(t, topic)) > i && looks.Load() > before })
	}
	require.Zero(t, probes.Load(), "rows of a topic without dead ones are not looked up")
	stop()
	counted.Close() // its servers' processes report what they counted, and end
	await(t, "the server counted", func() bool {
		return one[int](t, pool, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'traced'`) == 0
	})
	read := one[int64](t, pool, readOfDeadSQL)
	require.Positive(t, read)
	return read
}

// tracers are several, one after the other.
type tracers []*between

func (all tracers) TraceQueryStart(ctx context.Context, conn *pgx.Conn, query pgx.TraceQueryStartData) context.Context {
	for _, b := range all {
		b.TraceQueryStart(ctx, conn, query)
	}
	return ctx
}

func (tracers) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (all tracers) TraceBatchStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, b := range all {
		b.TraceBatchStart(ctx, conn, data)
	}
	return ctx
}

func (tracers) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (tracers) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

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
		await(t, "the row waits", func() bool { return dead(t, pool) == 2 })
		require.NoError(t, operator.Commit(ctx))
		await(t, "it is published", func() bool { return len(values(t, topic)) == 1 && dead(t, pool) == 0 })
		await(t, "nothing is left of it", func() bool { return one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_dead_freed`) == 0 })
	})
}

// Property: the rows of a topic that is resumed are handed back in bounded batches, each when the
// one before is published.
func TestResumedTopicIsHandedBackInBatches(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	const waiting = 2*relay.HandBackMax + 10
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
