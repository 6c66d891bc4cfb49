package pgtest

import (
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// PoolWith is Pool on a database with tables of the test's own, which the statements make.
func PoolWith(tb testing.TB, sql string) *pgxpool.Pool {
	tb.Helper()
	pool := Pool(tb)
	if _, err := pool.Exec(tb.Context(), sql); err != nil {
		tb.Fatalf("make the test's tables: %v", err)
	}
	return pool
}

// NoPool is of a server that does not exist: who asks it for a connection gets an error at once, which proves of all others
// that they need none.
func NoPool(tb testing.TB) *pgxpool.Pool {
	tb.Helper()
	pool, err := pgxpool.New(tb.Context(), "postgres://nobody@127.0.0.1:1/none?connect_timeout=1")
	if err != nil {
		tb.Fatalf("make a pool of no server: %v", err)
	}
	tb.Cleanup(pool.Close)
	return pool
}

// Count returns the number that a query counts.
func Count(tb testing.TB, pool *pgxpool.Pool, sql string, args ...any) (n int) {
	tb.Helper()
	if err := pool.QueryRow(tb.Context(), sql, args...).Scan(&n); err != nil {
		tb.Fatalf("count: %v\n%s", err, sql)
	}
	return n
}
