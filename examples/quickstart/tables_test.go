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
// outbox unchanged; tables in a schema of its name are refused. (The other examples use the same
// function for it.)
func TestTablesOfAUserSurvive(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := pgtest.Connect(t, address)
	pgtest.Exec(t, conn, ordersSQL)
	pgtest.Exec(t, conn, `INSERT INTO effectonce.outbox (topic, payload) VALUES ('payments', '{}')`)
	var out bytes.Buffer
	for range 2 {
		require.NoError(t, run(t.Context(), &out, address))
	}
	rows := func(schema string) (text string) {
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT concat_ws(' ', (SELECT count(*) FROM `+schema+`.orders), (SELECT count(*) FROM `+schema+`.invoices),
			(SELECT count(*) FROM effectonce.outbox), (SELECT count(*) FROM effectonce.outbox_replicas), (SELECT count(*) FROM effectonce.consumers))`).Scan(&text))
		return text
	}
	require.Equal(t, "500 500 1 0 0", rows("public"))
	pgtest.Exec(t, conn, `DROP SCHEMA effectonce_quickstart CASCADE; CREATE SCHEMA effectonce_quickstart; SET search_path = effectonce_quickstart;`+ordersSQL)
	err := run(t.Context(), &out, address)
	require.ErrorIs(t, err, startup.ErrNotOwn)
	require.ErrorContains(t, err, "RENAME TO")
	require.Equal(t, "500 500 1 0 0", rows("effectonce_quickstart"))
}
