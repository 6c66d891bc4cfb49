package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/examples/startup"
	"github.com/effectonce/effectonce/internal/pgtest"
)

const paymentsSQL = `
CREATE TABLE orders AS SELECT n AS id FROM generate_series(1, 500) AS n;
CREATE TABLE payment_orders AS SELECT * FROM orders;`

// Property: in a database that is in use, an order of the example leaves a user's tables and
// requests unchanged; tables in a schema of its name are refused.
func TestTablesOfAUserSurvive(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := pgtest.Connect(t, address)
	pgtest.Exec(t, conn, paymentsSQL)
	s, err := openSite(t.Context(), address)
	require.NoError(t, err)
	defer s.close(t.Context())
	answer, err := s.ask(t.Context(), "", idempotency.NewKey(), request{Customer: s.customerOf("guest"), Cents: 100})
	require.NoError(t, err)
	require.Equal(t, 201, answer.status)
	count := func() (n int) {
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM orders) + (SELECT count(*) FROM payment_orders)
			+ (SELECT count(*) FROM effectonce.idempotency_keys) + (SELECT count(*) FROM effectonce.outbox)`).Scan(&n))
		return n
	}
	require.Equal(t, 1000, count())
	s.Pool.Close()
	pgtest.Exec(t, conn, `DROP SCHEMA effectonce_payments CASCADE; CREATE SCHEMA effectonce_payments; SET search_path = effectonce_payments;`+paymentsSQL)
	_, err = openSite(t.Context(), address)
	require.ErrorIs(t, err, startup.ErrNotOwn)
	require.Equal(t, 1000, count())
}
