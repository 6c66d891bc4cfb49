package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/examples/startup"
	"github.com/effectonce/effectonce/internal/pgtest"
)

const invoicesSQL = `
CREATE TABLE invoices AS SELECT 'order-' || n AS order_id, n AS cents, 'EUR' AS currency FROM generate_series(1, 500) AS n;
CREATE TABLE avro_invoices AS SELECT * FROM invoices;`

// Property: in a database that is in use, the example leaves a user's tables unchanged; tables in a
// schema of its name are refused.
func TestTablesOfAUserSurvive(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := pgtest.Connect(t, address)
	pgtest.Exec(t, conn, invoicesSQL)
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), &out, address))
	count := func() (n int) {
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM invoices) + (SELECT count(*) FROM avro_invoices)
			+ (SELECT count(*) FROM effectonce.consumers)`).Scan(&n))
		return n
	}
	require.Equal(t, 1000, count())
	pgtest.Exec(t, conn, `DROP SCHEMA effectonce_avro CASCADE; CREATE SCHEMA effectonce_avro; SET search_path = effectonce_avro;`+invoicesSQL)
	require.ErrorIs(t, run(t.Context(), &out, address), startup.ErrNotOwn)
	require.Equal(t, 1000, count())
}
