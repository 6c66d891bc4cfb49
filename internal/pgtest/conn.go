package pgtest

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
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
func Now(t *testing.T) (now time.Time) {
	t.Helper()
	server, _ := shared.get(t)
	require.NoError(t, Connect(t, server.URL).QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&now))
	return now
}

// Exec runs a statement that has to succeed.
func Exec(t *testing.T, conn *pgx.Conn, sql string, args ...any) {
	t.Helper()
	_, err := conn.Exec(t.Context(), sql, args...)
	require.NoError(t, err, sql)
}

// Blocked waits until a session waits for a lock of holder.
func Blocked(t *testing.T, look, holder *pgx.Conn) {
	t.Helper()
	testwait.True(t, "a session waits for a lock", func() bool {
		var waits bool
		err := look.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid)))", int32(holder.PgConn().PID())).Scan(&waits)
		return err == nil && waits
	})
}

// Plan runs a statement in a transaction that is rolled back, and returns its plan with the rows
// that it touched.
func Plan(t *testing.T, conn *pgx.Conn, sql string, args ...any) string {
	t.Helper()
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	rows, err := tx.Query(t.Context(), "EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) "+sql, args...)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	return strings.Join(lines, "\n")
}
