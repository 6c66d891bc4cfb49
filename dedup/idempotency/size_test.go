package idempotency_test

import (
	"context"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// BenchmarkKeySize says what a key under Once costs in disk, write-ahead log and transaction IDs,
// with work that writes nothing itself, and how many keys a reaper forgets in a second: see
// docs/benchmarks.md.
func BenchmarkKeySize(b *testing.B) {
	b.Run("uuid7", func(b *testing.B) { benchmarkKeySize(b, idempotency.NewKey, 200) })
	b.Run("random", func(b *testing.B) { benchmarkKeySize(b, uuid.NewString, 200) })
	b.Run("uuid7 without a body", func(b *testing.B) { benchmarkKeySize(b, idempotency.NewKey, 0) })
}

func benchmarkKeySize(b *testing.B, value func() string, bodyBytes int) {
	b.Helper()
	cluster := pgtest.Cluster(b, map[string]string{"fsync": "on", "synchronous_commit": "on", "max_wal_size": "10GB", "checkpoint_timeout": "1h"})
	pgtest.Migrate(b, cluster.URL)
	config, err := pgxpool.ParseConfig(cluster.URL)
	require.NoError(b, err)
	config.MaxConns = 32
	pool := pgtest.PoolOf(b, config)
	o, err := idempotency.New(pool, idempotency.Config{Operation: "order"})
	require.NoError(b, err)
	body := make([]byte, bodyBytes)
	read := func() (wal, xids int64) {
		require.NoError(b, pool.QueryRow(b.Context(), `SELECT pg_current_wal_insert_lsn() - '0/0', pg_snapshot_xmax(pg_current_snapshot())::text::bigint`).Scan(&wal, &xids))
		return wal, xids
	}
	run := func(sql string) {
		_, err := pool.Exec(b.Context(), sql)
		require.NoError(b, err)
	}
	run("CHECKPOINT")
	wal, xids := read()
	b.SetParallelism(16)
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			_, err := o.Once(b.Context(), key(value()), func(context.Context, pgx.Tx) (idempotency.Response, error) {
				return idempotency.Response{Status: 201, Header: map[string][]string{"Content-Type": {"application/json"}}, Body: body}, nil
			})
			require.NoError(b, err)
		}
	})
	b.StopTimer()
	figures := map[string]int64{}
	walThen, xidsThen := read()
	figures["WAL-B"] = walThen - wal
	figures["XIDs"] = xidsThen - xids
	var table, indexes int64
	require.NoError(b, pool.QueryRow(b.Context(), `SELECT pg_table_size('effectonce.idempotency_keys'), pg_indexes_size('effectonce.idempotency_keys')`).Scan(&table, &indexes))
	figures["table-B"] = table
	figures["index-B"] = indexes
	run(`UPDATE effectonce.idempotency_keys SET expires_at = clock_timestamp()`)
	run(`VACUUM FULL effectonce.idempotency_keys`)
	require.NoError(b, pool.QueryRow(b.Context(), `SELECT pg_table_size('effectonce.idempotency_keys')`).Scan(&table))
	figures["packed-B"] = table
	run("CHECKPOINT")
	wal, _ = read()
	b.ResetTimer() // of ns/op: what forgetting a key takes
	b.StartTimer()
	reaped, err := o.Reap(b.Context())
	b.StopTimer()
	require.NoError(b, err)
	require.EqualValues(b, b.N, reaped)
	walThen, _ = read()
	figures["reap-WAL-B"] = walThen - wal
	for unit, n := range figures {
		b.ReportMetric(float64(n)/float64(b.N), unit+"/key")
	}
	b.ReportMetric(float64(reaped)/b.Elapsed().Seconds(), "reaped/s")
}
