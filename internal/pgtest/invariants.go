package pgtest

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// settleMax is how long a broken invariant may take to recover: a connection that was just cut
// keeps its transaction until the server notices.
const (
	settleMax   = 2 * time.Minute
	settleEvery = 20 * time.Millisecond
)

// invariant is a query that must find nothing when a test ends, whatever the test. Each of its rows
// is one text, for the message.
type invariant struct {
	name  string
	table string // without which the query makes no sense
	sql   string
}

func invariants() []invariant {
	return []invariant{
		{
			name: "no session is left in a transaction",
			sql: `-- invariant.idle_in_transaction
SELECT format('pid %s, %s since %s, last: %s', pid, state, xact_start, query)
FROM pg_stat_activity
WHERE datname = current_database() AND state LIKE 'idle in transaction%'`,
		},
		{
			// The relay takes the rows below the snapshot's xmin. A visible row at or above xmax
			// comes from another cluster (a restored dump), and would be skipped or sent out of
			// order.
			name:  "no outbox row is newer than the cluster's transactions",
			table: "effectonce.outbox",
			sql: `-- invariant.outbox_txid
SELECT format('txid %s', txid) FROM effectonce.outbox
WHERE txid >= pg_snapshot_xmax(pg_current_snapshot()) LIMIT 10`,
		},
	}
}

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
	for _, i := range invariants() {
		if err := i.check(ctx, conn); err != nil {
			tb.Errorf("INVARIANT: the test's database at its end: %v", err)
		}
	}
}

// check returns nil as soon as the query finds nothing.
func (i invariant) check(ctx context.Context, conn *pgx.Conn) error {
	limit := time.NewTimer(settleMax)
	defer limit.Stop()
	tick := time.NewTicker(settleEvery)
	defer tick.Stop()
	for {
		found, err := i.find(ctx, conn)
		if err != nil {
			return fmt.Errorf("check that %s: %w", i.name, err)
		}
		if len(found) == 0 {
			return nil
		}
		select {
		case <-limit.C:
			return fmt.Errorf("%s, except:\n%s", i.name, strings.Join(found, "\n"))
		case <-tick.C:
		}
	}
}

func (i invariant) find(ctx context.Context, conn *pgx.Conn) ([]string, error) {
	if i.table != "" {
		var there bool
		err := conn.QueryRow(ctx, "SELECT to_regclass($1) IS NOT NULL", i.table).Scan(&there)
		if err != nil || !there {
			return nil, err
		}
	}
	rows, err := conn.Query(ctx, i.sql)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}
