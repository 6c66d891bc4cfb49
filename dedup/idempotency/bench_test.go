package idempotency_test

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// BenchmarkOnce compares a handler without keys (BEGIN, an insert, an update, COMMIT) with the same one under Once, and with
// a replay, at 32 connections.
func BenchmarkOnce(b *testing.B) {
	cluster := pgtest.Cluster(b, map[string]string{"fsync": "on", "synchronous_commit": "on"}) // as in production
	pgtest.Migrate(b, cluster.URL)
	config, err := pgxpool.ParseConfig(cluster.URL)
	require.NoError(b, err)
	config.MaxConns = 32
	pool, err := pgxpool.NewWithConfig(b.Context(), config)
	require.NoError(b, err)
	b.Cleanup(pool.Close)
	_, err = pool.Exec(b.Context(), `CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL);
		CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL); INSERT INTO accounts SELECT i, 0 FROM generate_series(0, 9999) AS i`)
	require.NoError(b, err)
	o, err := idempotency.New(pool, idempotency.Config{Operation: "order"})
	require.NoError(b, err)
	body := make([]byte, 200)
	var n atomic.Int64
	work := func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		i := n.Add(1)
		if _, err := tx.Exec(ctx, `UPDATE accounts SET balance = balance + 1 WHERE id = $1`, i*7919%10000); err != nil {
			return idempotency.Response{}, err
		}
		return idempotency.Response{Status: 201, Body: body}, effect(ctx, tx, "name")
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
		b.Run(way.name, func(b *testing.B) {
			b.SetParallelism(16)
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					require.NoError(b, way.run(b.Context(), n.Add(1)))
				}
			})
		})
	}
}
