package main_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// parkSQL is what a consumer leaves: order-1 failed and holds its key, with two behind it; one
// without a key; one of another topic with a key that is no text; one that is too large.
const parkSQL = `
INSERT INTO effectonce.consumers (name, consumer_group, topics) VALUES ('billing/orders', 'billing', '{orders}'), ('audit/payments', 'audit', '{payments}');
INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", key, payload, headers, reason, error, attempts, state, parked_at)
SELECT c.id, ('01976f00-0000-7000-8000-00000000000' || m.n)::uuid, c.topics[1], 0, m.n, m.key, convert_to(m.payload, 'UTF8'),
  '{"authorization": "CANARY header"}', m.reason, m.error, 10, m.state, clock_timestamp() - interval '10 minutes'
FROM (VALUES
  (1, 'billing', 'order-1'::bytea, E'CANARY payload\n\ttabbed \x1b[31m', 'failed', E'no account 7\nat ledger', 'parked'),
  (2, 'billing', 'order-1', 'CANARY', 'behind', '', 'behind'),
  (3, 'billing', 'order-1', 'CANARY', 'behind', '', 'behind'),
  (4, 'billing', NULL, 'CANARY', 'permanent', E'evil \x1b]0;x\x07', 'parked'),
  (5, 'audit', '\x00ff', 'CANARY', 'undecodable', 'no JSON', 'parked'),
  (6, 'audit', 'p', NULL, 'too_large', 'message has 99 bytes', 'parked')
) AS m (n, consumer_group, key, payload, reason, error, state)
JOIN effectonce.consumers c USING (consumer_group) ORDER BY m.n`

const idPrefix = "01976f00-0000-7000-8000-00000000000"

// parkedRows lists what is parked, as "offset state".
func parkedRows(t *testing.T, conn *pgx.Conn) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), `SELECT format('%s %s', "offset", state) FROM effectonce.parked_messages ORDER BY seq`)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

var untouched = []string{"1 parked", "2 behind", "3 behind", "4 parked", "5 parked", "6 parked"}
