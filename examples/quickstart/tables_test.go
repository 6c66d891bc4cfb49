package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/examples/startup"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// ordersSQL creates what a user may have: 500 orders, and invoices for them.
const ordersSQL = `
CREATE TABLE orders AS SELECT 'order-' || n AS id, n AS amount FROM generate_series(1, 500) AS n;
CREATE TABLE invoices AS SELECT id AS order_id, amount FROM orders;`

// Property: in a database that is in use, two runs of the quick start leave a user's tables and
// outbox unchanged.
func TestTablesOfAUserSurvive(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := pgtest.Connect(t, address)
	pgtest.Exec(t, conn, ordersSQL)
	pgtest.Exec(t, conn, `INSERT INTO effectonce.outbox (topic, payload) VALUES ('payments', '{}')`)
	for range 2 {
		var out bytes.Buffer
		require.NoError(t, run(t.Context(), &out, address))
		require.Contains(t, out.String(), "3 orders, 4 messages (one of them twice), 3 invoices")
	}
	var orders, invoices, outbox, relays, consumers int
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM invoices),
		(SELECT count(*) FROM effectonce.outbox), (SELECT count(*) FROM effectonce.outbox_replicas), (SELECT count(*) FROM effectonce.consumers)`).
		Scan(&orders, &invoices, &outbox, &relays, &consumers))
	require.Equal(t, []int{500, 500, 1, 0, 0}, []int{orders, invoices, outbox, relays, consumers})
}

// Property: tables in a schema of the quick start's name that it did not create are refused, and
// are unchanged.
func TestSchemaOfAUserIsRefused(t *testing.T) {
	t.Parallel()
	address := pgtest.EmptyDatabase(t)
	conn := pgtest.Connect(t, address)
	pgtest.Exec(t, conn, `CREATE SCHEMA effectonce_quickstart; SET search_path = effectonce_quickstart;`+ordersSQL)
	var out bytes.Buffer
	err := run(t.Context(), &out, address)
	require.ErrorIs(t, err, startup.ErrNotOwn)
	require.ErrorContains(t, err, "RENAME TO")
	var orders, invoices int
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM invoices)`).Scan(&orders, &invoices))
	require.Equal(t, []int{500, 500}, []int{orders, invoices})
}
