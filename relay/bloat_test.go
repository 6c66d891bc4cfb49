package relay_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// bystander holds a snapshot and a transaction id until the test ends.
func bystander(t *testing.T, address string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), address)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, conn.Close(context.WithoutCancel(t.Context()))) })
	_, err = conn.Exec(t.Context(), `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT pg_current_xact_id()`)
	require.NoError(t, err)
}

// relayPages is how many pages the tables that a relay writes may have, with their indexes: what
// they have when they are new, and room for the versions that an open transaction keeps. Progress
// is written 20 times a second; each write leaves a version of some 150 bytes.
const relayPages = 120

// Property: whatever is published, and whatever snapshots are held during that, the relay changes
// and deletes no row of the outbox and leaves no dead one, also without vacuum; and what it writes
// itself stays small. Row O21 of guarantees.md.
func TestBacklogLeavesNoDeadRows(t *testing.T) {
	longtest.Only(t, "1,000,000 rows")
	t.Parallel()
	ctx, topic, rows := t.Context(), kafkatest.Topic(t, 4), 1_000_000
	if testing.Short() {
		rows = 50_000
	}
	server := pgtest.Cluster(t, map[string]string{"autovacuum": "off", "max_wal_size": "4GB"})
	pgtest.Migrate(t, server.URL)
	bystander(t, server.URL)
	pool, err := pgxpool.New(ctx, server.URL)
	require.NoError(t, err)
	defer pool.Close()
	config := pool.Config()
	config.ConnConfig.RuntimeParams["application_name"] = "the relay"
	relays, err := pgxpool.NewWithConfig(ctx, config)
	require.NoError(t, err)
	defer relays.Close()

	r := newRelay(t, relays, relay.Config{Lease: time.Minute})
	working, stop := context.WithCancel(ctx)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- r.Run(working) }()
	const parts = 20
	for range parts {
		_, err := pool.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key, payload)
			SELECT $1, convert_to((n % 1000)::text, 'UTF8'), convert_to(repeat(md5(n::text), 8), 'UTF8') FROM generate_series(1, $2::int) AS n`, topic, rows/parts)
		require.NoError(t, err)
	}
	testwait.True(t, "all rows are published", func() bool {
		return one[int](t, pool, `SELECT coalesce(sum(published), 0) FROM effectonce.outbox_progress_now`) == rows
	})
	stop()
	require.NoError(t, <-done)
	require.Equal(t, rows, kafkatest.Count(t, topic))

	// A connection hands its statistics in before it is gone.
	relays.Close()
	testwait.True(t, "the server counted", func() bool {
		return one[int](t, pool, `SELECT count(*) FROM pg_stat_activity WHERE application_name = 'the relay'`) == 0 &&
			one[int](t, pool, `SELECT sum(n_tup_ins) FROM pg_stat_user_tables WHERE relname ~ '^outbox_[0-9]$'`) == rows
	})
	for _, column := range []string{"n_tup_upd", "n_tup_del", "n_dead_tup"} {
		assert.Zero(t, one[int](t, pool, `SELECT sum(`+column+`) FROM pg_stat_user_tables WHERE relname ~ '^outbox_[0-9]$'`), column)
	}
	const own = ` FROM pg_stat_user_tables WHERE schemaname = 'effectonce' AND relname ~ '^outbox_(progress|ticks|slots|relays|replicas|paused|dead|scheduled)$'`
	assert.Less(t, one[int](t, pool, `SELECT sum(pg_total_relation_size(relid)) / 8192`+own), relayPages,
		one[string](t, pool, `SELECT string_agg(concat_ws(' ', relname, 'pages', pg_total_relation_size(relid) / 8192, 'dead', n_dead_tup), ', ')`+own))
}

// Property: an old snapshot, which keeps all dead versions, makes no write of progress slower:
// after an hour's worth of writes (72,000) and of renewals of the lease (1,440) a write reads as
// many pages as before. Row O43 of guarantees.md.
func TestOldSnapshotDoesNotSlowProgress(t *testing.T) {
	longtest.Only(t, "72,000 commits")
	t.Parallel()
	ctx, topic := t.Context(), kafkatest.Topic(t, 1)
	server := pgtest.Cluster(t, map[string]string{"synchronous_commit": "off"})
	pgtest.Migrate(t, server.URL)
	bystander(t, server.URL)
	pool, err := pgxpool.New(ctx, server.URL)
	require.NoError(t, err)
	defer pool.Close()
	r := newRelay(t, pool, relay.Config{})
	publish := func() time.Duration {
		insert(t, pool, topic, "k", "1")
		begun := time.Now()
		drain(t, r)
		return time.Since(begun)
	}
	publish()
	advance := func() int {
		n := one[int64](t, pool, `SELECT max(n) FROM effectonce.outbox_advances`)
		return pagesOf(t, pool, relay.AdvanceSQL, nil, "default", 0, n+1, 1, 0, nil, 0, 0, 1, nil)
	}
	acquire := func() int {
		return pagesOf(t, pool, relay.AcquireSQL, nil, "default", 0, "test", "1 second", nil, nil)
	}
	before, took, acquires := advance(), publish(), acquire()

	// What a relay writes in an hour, and what it clears away, each in a transaction of its own: a
	// row that is made and removed in one leaves nothing.
	const hour = 72_000
	conn, err := pool.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	_, err = conn.Exec(ctx, `DO $$
		BEGIN
			FOR i IN 1..72000 LOOP
				INSERT INTO effectonce.outbox_advances SELECT relay, shard, n + 1, epoch, tick, next_tick, seq, floor, published, journal_offset
				FROM effectonce.outbox_advances WHERE relay = 'default' AND shard = 0 ORDER BY n DESC LIMIT 1;
				IF i % 1000 = 0 THEN
					DELETE FROM effectonce.outbox_advances WHERE n < (SELECT max(n) - 1000 FROM effectonce.outbox_advances);
				END IF;
				IF i % 50 = 0 THEN
					UPDATE effectonce.outbox_progress SET lease_until = lease_until;
				END IF;
				COMMIT;
			END LOOP;
		END $$`)
	require.NoError(t, err)
	require.Greater(t, one[int64](t, pool, `SELECT max(n) FROM effectonce.outbox_advances`), int64(hour))
	after := advance()
	t.Logf("pages read and written: by a write of progress %d before, %d after an hour of them; by taking the lease %d and %d; a drain of one row took %v and %v",
		before, after, acquires, acquire(), took, publish())
	require.Less(t, after, before+30, "the index got deeper; nothing else grows")
}

// pagesOf executes a statement in a transaction that is rolled back, and returns how many pages it
// touched.
func pagesOf(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) int {
	t.Helper()
	ctx := t.Context()
	tx, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback(ctx)) }()
	var plan []struct {
		Plan struct {
			Hit  int `json:"Shared Hit Blocks"`
			Read int `json:"Shared Read Blocks"`
		}
	}
	require.NoError(t, tx.QueryRow(ctx, "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "+sql, append([]any{pgx.QueryExecModeExec}, args...)...).Scan(&plan))
	return plan[0].Plan.Hit + plan[0].Plan.Read
}
