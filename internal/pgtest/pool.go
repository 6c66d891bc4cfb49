package pgtest

import (
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/internal/testwait"
)

// PoolWith is Pool on a database with additional tables, which the statements create.
func PoolWith(tb testing.TB, sql string) *pgxpool.Pool {
	tb.Helper()
	pool := Pool(tb)
	if _, err := pool.Exec(tb.Context(), sql); err != nil {
		tb.Fatalf("create the test's tables: %v", err)
	}
	return pool
}

// PoolOf returns a pool of the test's own settings, closed when the test ends.
func PoolOf(tb testing.TB, config *pgxpool.Config) *pgxpool.Pool {
	tb.Helper()
	pool, err := pgxpool.NewWithConfig(tb.Context(), config)
	if err != nil {
		tb.Fatalf("open a pool of the test: %v", err)
	}
	tb.Cleanup(func() {
		closed := make(chan struct{})
		go func() {
			pool.Close()
			close(closed)
		}()
		testwait.Chan(tb, "the test releases the connections of its pool", closed)
	})
	return pool
}

// NoPool returns a pool of a server that does not exist: code that works with it needs no connection.
func NoPool(tb testing.TB) *pgxpool.Pool {
	tb.Helper()
	pool, err := pgxpool.New(tb.Context(), "postgres://nobody@127.0.0.1:1/none?connect_timeout=1")
	if err != nil {
		tb.Fatalf("create a pool of no server: %v", err)
	}
	tb.Cleanup(pool.Close)
	return pool
}

// Unused waits until all connections of a pool are released: it closes some of them in the background.
func Unused(tb testing.TB, pool *pgxpool.Pool) {
	tb.Helper()
	testwait.Equal(tb, 0, "connections in use", func() int32 { return pool.Stat().AcquiredConns() })
}

// Count returns the number that a query counts.
func Count(tb testing.TB, db Querier, sql string, args ...any) int {
	tb.Helper()
	return Value[int](tb, db, sql, args...)
}
