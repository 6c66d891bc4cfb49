package pgtest

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/testwait"
)

// Connect opens a connection that ends with the test.
func Connect(t *testing.T, address string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), address)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.PgConn().Conn().Close() })
	return conn
}

// Now returns the time by the clock of the server that the tests of this process share.
func Now(t *testing.T) time.Time {
	t.Helper()
	server, _ := shared.get(t)
	return Value[time.Time](t, Connect(t, server.URL), "SELECT clock_timestamp()")
}

// Exec runs a statement that has to succeed.
func Exec(t *testing.T, db Querier, sql string, args ...any) {
	t.Helper()
	_, err := db.Exec(t.Context(), sql, args...)
	require.NoError(t, err, sql)
}

// Blocked waits until a session waits for a lock of holder.
func Blocked(t *testing.T, look, holder *pgx.Conn) {
	t.Helper()
	testwait.True(t, "a session waits for a lock", func() bool {
		return Value[bool](t, look, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid)))", int32(holder.PgConn().PID()))
	})
}

// Querier is a pool, a connection or a transaction.
type Querier interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Rows returns what a query finds.
func Rows[T any](tb testing.TB, db Querier, to pgx.RowToFunc[T], sql string, args ...any) []T {
	tb.Helper()
	rows, err := db.Query(tb.Context(), sql, args...)
	require.NoError(tb, err, sql)
	all, err := pgx.CollectRows(rows, to)
	require.NoError(tb, err, sql)
	return all
}

// Column returns what a query of one column finds.
func Column[T any](tb testing.TB, db Querier, sql string, args ...any) []T {
	tb.Helper()
	return Rows(tb, db, pgx.RowTo[T], sql, args...)
}

// Value returns the first value that a query finds.
func Value[T any](tb testing.TB, db Querier, sql string, args ...any) (value T) {
	tb.Helper()
	require.NoError(tb, db.QueryRow(tb.Context(), sql, args...).Scan(&value), sql)
	return value
}

// Plan runs a statement in a transaction that is rolled back, and returns its plan with the rows
// that it touched.
func Plan(t *testing.T, conn *pgx.Conn, sql string, args ...any) string {
	t.Helper()
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	lines := Column[string](t, tx, "EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) "+sql, args...)
	require.NoError(t, tx.Rollback(t.Context()))
	return strings.Join(lines, "\n")
}
