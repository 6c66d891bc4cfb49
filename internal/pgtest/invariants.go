package pgtest

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/pause"
)

const (
	// settleMax is how long a broken invariant may take to recover: a connection that was just cut keeps
	// its transaction until the server notices.
	settleMax   = 2 * time.Minute
	settleEvery = 20 * time.Millisecond
)

// idleSQL must find nothing when a test ends, whatever the test. So must newerSQL: the relay takes the
// rows below the snapshot's xmin. A visible row at or above xmax comes from another cluster (a restored
// dump), and would be skipped or sent out of order.
const (
	idleSQL = `-- invariant.idle_in_transaction
SELECT pg_catalog.format('a session is left in a transaction: pid %s, %s since %s, last: %s', pid, state, xact_start, query)
FROM pg_stat_activity
WHERE datname = current_database() AND state LIKE 'idle in transaction%'`

	newerSQL = `-- invariant.outbox_txid
SELECT pg_catalog.format('an outbox row is newer than the cluster''s transactions: txid %s', txid) FROM effectonce.outbox
WHERE txid >= pg_snapshot_xmax(pg_current_snapshot()) LIMIT 10`
)

// checkInvariants fails the test if its database is not in order. It does not check after a failed
// test: unfinished work would only hide the test's own message.
func checkInvariants(ctx context.Context, tb testing.TB, address string) {
	tb.Helper()
	if tb.Failed() {
		return
	}
	conn, err := pgx.Connect(ctx, address)
	if err != nil {
		tb.Errorf("connect to check the test's database: %v", err)
		return
	}
	defer func() { _ = conn.Close(ctx) }()
	limited, cancel := context.WithTimeout(ctx, settleMax)
	defer cancel()
	found, err := broken(ctx, conn)
	for err == nil && len(found) > 0 && pause.For(limited, settleEvery) {
		found, err = broken(ctx, conn)
	}
	if err != nil || len(found) > 0 {
		tb.Errorf("INVARIANT: the test's database at its end: %v\n%s", err, strings.Join(found, "\n"))
	}
}

func broken(ctx context.Context, conn *pgx.Conn) ([]string, error) {
	var there bool
	if err := conn.QueryRow(ctx, "SELECT to_regclass('effectonce.outbox') IS NOT NULL").Scan(&there); err != nil {
		return nil, err
	}
	sql := idleSQL
	if there {
		sql += "\nUNION ALL (" + newerSQL + ")"
	}
	rows, err := conn.Query(ctx, sql)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}
