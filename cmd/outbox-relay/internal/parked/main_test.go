package parked_test

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/parked"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const schema = "effectonce"

var (
	connect = pgtest.Connect
	exec    = pgtest.Exec
)

// park inserts what a consumer would, each row as "key reason state", and returns the rows' seq. The key -
// is null. The ID of a row is 0…n, its offset n, its payload "payload n", n counting from 1.
func park(t *testing.T, conn *pgx.Conn, rows ...string) []int64 {
	t.Helper()
	exec(t, conn, `INSERT INTO effectonce.consumers (name, consumer_group, topics) VALUES ('billing/orders', 'billing', '{orders}')
		ON CONFLICT (name) DO NOTHING`)
	var seqs []int64
	for i, row := range rows {
		var key, reason, state string
		_, err := fmt.Sscan(row, &key, &reason, &state)
		require.NoError(t, err)
		var seq int64
		err = conn.QueryRow(t.Context(), `INSERT INTO effectonce.parked_messages
				(consumer, message_id, topic, partition, "offset", key, payload, headers, record_time, reason, error, attempts, state)
			SELECT id, ('00000000-0000-0000-0000-' || lpad($1::bigint::text, 12, '0'))::uuid, 'orders', 0, $1::bigint, convert_to(nullif($2, '-'), 'UTF8'),
				convert_to('payload ' || $1::bigint, 'UTF8'), '{"type": "order"}', clock_timestamp(), $3, 'error ' || $1::bigint, 10, $4
			FROM effectonce.consumers WHERE name = 'billing/orders' RETURNING seq`, i+1, key, reason, state).Scan(&seq)
		require.NoError(t, err)
		seqs = append(seqs, seq)
	}
	return seqs
}

// left lists what is parked, each row as "n reason state".
func left(t *testing.T, conn *pgx.Conn) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), `SELECT format('%s %s %s', "offset", reason, state) FROM effectonce.parked_messages ORDER BY seq`)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

var ana = operator.By{Who: "ana@ops", Why: "the account exists now"}

func retry(t *testing.T, conn *pgx.Conn, seqs ...int64) *parked.Result {
	t.Helper()
	result, err := parked.Retry(t.Context(), conn, schema, ana, seqs)
	require.NoError(t, err)
	return result
}

func discard(t *testing.T, conn *pgx.Conn, wholeKeys bool, seqs ...int64) *parked.Result {
	t.Helper()
	result, err := parked.Discard(t.Context(), conn, schema, ana, seqs, wholeKeys)
	require.NoError(t, err)
	return result
}

// succeed is a consumer that handles the first message that is handed back.
const succeed = `WITH handled AS (DELETE FROM effectonce.parked_messages
		WHERE seq = (SELECT seq FROM effectonce.parked_messages WHERE state = 'retry' ORDER BY seq LIMIT 1 FOR UPDATE)
		RETURNING seq, consumer, topic, partition, key)
	UPDATE effectonce.parked_messages p SET state = CASE p.reason WHEN 'behind' THEN 'retry' ELSE 'parked' END
	FROM handled h WHERE p.state = 'behind'
		AND p.seq = (SELECT min(n.seq) FROM effectonce.parked_messages n WHERE n.consumer = h.consumer AND n.topic = h.topic
			AND n.partition = h.partition AND n.key = h.key AND n.seq > h.seq)`

// fail is one whose handler fails at it.
const fail = `UPDATE effectonce.parked_messages SET state = 'parked', reason = 'failed', error = 'failed again', attempts = attempts + 10
	WHERE seq = (SELECT seq FROM effectonce.parked_messages WHERE state = 'retry' ORDER BY seq LIMIT 1 FOR UPDATE)`
