package dead_test

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/dead"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const schema = "effectonce"

var (
	connect = pgtest.Connect
	exec    = pgtest.Exec
)

// insertDead inserts what a relay would, each row as "key reason state", and returns the places.
// The key - is null. The ID of a row is 0…n, its seq n, its payload "payload n", n counting from 1.
func insertDead(t *testing.T, conn *pgx.Conn, rows ...string) []dead.Place {
	t.Helper()
	var places []dead.Place
	for i, row := range rows {
		var key, reason, state string
		_, err := fmt.Sscan(row, &key, &reason, &state)
		require.NoError(t, err)
		exec(t, conn, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, payload, headers, created_at, reason, error, state)
			VALUES ('default', $1::bigint, ('00000000-0000-0000-0000-' || lpad($1::bigint::text, 12, '0'))::uuid, 'orders', convert_to(nullif($2, '-'), 'UTF8'),
				convert_to('payload ' || $1::bigint, 'UTF8'), '{"type": "order"}', '2026-01-02 03:04:05Z', $3, 'error ' || $1::bigint, $4)`, i+1, key, reason, state)
		places = append(places, at(int64(i+1)))
	}
	return places
}

func at(seq int64) dead.Place { return dead.Place{Relay: "default", Seq: seq} }

// left lists what is dead, each row as "seq reason state".
func left(t *testing.T, conn *pgx.Conn) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), `SELECT format('%s %s %s', seq, reason, state) FROM effectonce.outbox_dead ORDER BY seq, relay`)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

var ana = operator.By{Who: "ana@ops", Why: "the limit is raised"}

func retry(t *testing.T, conn *pgx.Conn, places ...dead.Place) *dead.Result {
	t.Helper()
	result, err := dead.Retry(t.Context(), conn, schema, ana, places)
	require.NoError(t, err)
	return result
}

func discard(t *testing.T, conn *pgx.Conn, wholeKeys bool, places ...dead.Place) *dead.Result {
	t.Helper()
	result, err := dead.Discard(t.Context(), conn, schema, ana, places, wholeKeys)
	require.NoError(t, err)
	return result
}

func to[T any](v T) *T { return &v }
