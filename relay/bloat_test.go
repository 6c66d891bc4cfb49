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
	"github.com/effectonce/effectonce/internal/pgtest"
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

// relayPages is how many pages the tables that a relay writes may have, with their indexes: what they have when
// they are new, and room for the versions that an open transaction keeps. Progress is written 20 times a second;
// each write leaves a version of some 150 bytes.
const relayPages = 120

// Property: whatever is published, and whoever holds a snapshot meanwhile, the relay changes and deletes no row of the
// outbox and leaves no dead one, also without vacuum; and what it writes itself stays small. Row O21.
func TestBacklogLeavesNoDeadRows(t *testing.T) {
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
	require.Eventually(t, func() bool {
		return one[int](t, pool, `SELECT coalesce(sum(published), 0) FROM effectonce.outbox_progress_now`) == rows
	}, 5*time.Minute, 20*time.Millisecond)
	stop()
	require.NoError(t, <-done)
	require.Equal(t, rows, kafkatest.Count(t, topic))

	// A connection hands its statistics in before it is gone.
	relays.Close()
	require.Eventually(t, func() bool {
		return one[int](t, pool, `SELECT count(*) FROM pg_stat_activity WHERE application_name = 'the relay'`) == 0 &&
			one[int](t, pool, `SELECT sum(n_tup_ins) FROM pg_stat_user_tables WHERE relname ~ '^outbox_[0-9]$'`) == rows
	}, 20*time.Second, 20*time.Millisecond)
	for _, column := range []string{"n_tup_upd", "n_tup_del", "n_dead_tup"} {
		assert.Zero(t, one[int](t, pool, `SELECT sum(`+column+`) FROM pg_stat_user_tables WHERE relname ~ '^outbox_[0-9]$'`), column)
	}
	const own = ` FROM pg_stat_user_tables WHERE schemaname = 'effectonce' AND relname ~ '^outbox_(progress|ticks|slots|relays|replicas|paused|dead|scheduled)$'`
	assert.Less(t, one[int](t, pool, `SELECT sum(pg_total_relation_size(relid)) / 8192`+own), relayPages,
		one[string](t, pool, `SELECT string_agg(concat_ws(' ', relname, 'pages', pg_total_relation_size(relid) / 8192, 'dead', n_dead_tup), ', ')`+own))
}
