package idempotency_test

import (
	"context"
	"net"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
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

// production is a cluster with settings as in production, of 32 connections.
func production(b *testing.B, settings map[string]string, dial pgconn.DialFunc) (*pgxpool.Pool, *idempotency.Operation) {
	b.Helper()
	cluster := pgtest.Cluster(b, settings)
	pgtest.Migrate(b, cluster.URL)
	config, err := pgxpool.ParseConfig(cluster.URL)
	require.NoError(b, err)
	config.MaxConns = 32
	if dial != nil {
		config.ConnConfig.DialFunc = dial
	}
	pool := pgtest.PoolOf(b, config)
	o, err := idempotency.New(pool, idempotency.Config{Operation: "order"})
	require.NoError(b, err)
	return pool, o
}

func benchmarkKeySize(b *testing.B, value func() string, bodyBytes int) {
	b.Helper()
	pool, o := production(b, map[string]string{"fsync": "on", "synchronous_commit": "on", "max_wal_size": "10GB", "checkpoint_timeout": "1h"}, nil)
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
	reaped, err := idempotency.Reap(b.Context(), pool, "")
	b.StopTimer()
	require.NoError(b, err)
	require.EqualValues(b, b.N, reaped.Forgotten)
	walThen, _ = read()
	figures["reap-WAL-B"] = walThen - wal
	for unit, n := range figures {
		b.ReportMetric(float64(n)/float64(b.N), unit+"/key")
	}
	b.ReportMetric(float64(reaped.Forgotten)/b.Elapsed().Seconds(), "reaped/s")
}

// distant is a connection to a server that is as far away.
type distant struct {
	net.Conn
	away time.Duration
}

func (c distant) Write(b []byte) (int, error) {
	<-time.After(c.away)
	return c.Conn.Write(b)
}

// BenchmarkOnceAtADistance is BenchmarkOnce over a network, where round trips are what costs.
func BenchmarkOnceAtADistance(b *testing.B) {
	for _, away := range []time.Duration{time.Millisecond, 3 * time.Millisecond} {
		b.Run(away.String(), func(b *testing.B) {
			benchmarkOnce(b, func(ctx context.Context, network, address string) (net.Conn, error) {
				conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
				return distant{conn, away}, err
			})
		})
	}
}

// BenchmarkOnce compares a handler without keys with the same one under Once, and with a replay, at
// 32 connections: one of two statements, and one of eight, as an order of three lines with its
// booking and its message has.
func BenchmarkOnce(b *testing.B) { benchmarkOnce(b, nil) }

func benchmarkOnce(b *testing.B, dial pgconn.DialFunc) {
	b.Helper()
	pool, o := production(b, map[string]string{"fsync": "on", "synchronous_commit": "on"}, dial)
	_, err := pool.Exec(b.Context(), `CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL);
		CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL); INSERT INTO accounts SELECT i, 0 FROM generate_series(0, 9999) AS i`)
	require.NoError(b, err)
	body := make([]byte, 200)
	var n atomic.Int64
	var statements int
	work := func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		i := n.Add(1)
		if _, err := tx.Exec(ctx, `UPDATE accounts SET balance = balance + 1 WHERE id = $1`, i*7919%10000); err != nil {
			return idempotency.Response{}, err
		}
		for range statements - 1 {
			if err := effect(ctx, tx, "name"); err != nil {
				return idempotency.Response{}, err
			}
		}
		return idempotency.Response{Status: 201, Body: body}, nil
	}
	_, err = o.Once(b.Context(), key("replayed"), work)
	require.NoError(b, err)
	for _, way := range []struct {
		name string
		run  func(ctx context.Context, i int64) error
	}{
		{"without", func(ctx context.Context, _ int64) error {
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				_, err := work(ctx, tx)
				return err
			})
		}},
		{"once", func(ctx context.Context, i int64) error {
			_, err := o.Once(ctx, key(strconv.FormatInt(i, 10)), work)
			return err
		}},
		{"replay", func(ctx context.Context, _ int64) error {
			_, err := o.Once(ctx, key("replayed"), work)
			return err
		}},
	} {
		for _, statements = range []int{2, 8} {
			b.Run(way.name+"/"+strconv.Itoa(statements), func(b *testing.B) {
				b.SetParallelism(16)
				b.RunParallel(func(pb *testing.PB) {
					for pb.Next() {
						require.NoError(b, way.run(b.Context(), n.Add(1)))
					}
				})
			})
		}
	}
}
