package pgtest

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/testwait"
)

const sessionsSQL = `-- explain.sessions
SELECT format('pid %s %s%s, %s since %s, blocked by %s: %s', a.pid, a.state, coalesce(' ' || a.wait_event, ''), a.application_name, coalesce(a.xact_start, a.state_change), pg_blocking_pids(a.pid), left(a.query, 300))
FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
UNION ALL
SELECT format('lock of pid %s: %s %s, granted %s', l.pid, l.mode, coalesce(l.relation::regclass::text, l.locktype), l.granted)
FROM pg_locks l
WHERE l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND l.pid <> pg_backend_pid()`

// explain has a wait of the test that fails print the sessions and locks of its database.
func explain(tb testing.TB, address string) {
	tb.Helper()
	ctx := context.WithoutCancel(tb.Context())
	testwait.Explain(tb, "sessions and locks", func() string {
		conn, err := pgx.Connect(ctx, address)
		if err != nil {
			return err.Error()
		}
		defer func() { _ = conn.Close(ctx) }()
		rows, err := conn.Query(ctx, sessionsSQL)
		if err != nil {
			return err.Error()
		}
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return fmt.Sprint(lines, err)
		}
		return strings.Join(lines, "\n")
	})
}
