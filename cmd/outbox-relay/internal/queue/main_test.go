package queue_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/queue"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const schema = "effectonce"

var (
	connect = pgtest.Connect
	exec    = pgtest.Exec
	ana     = operator.By{Who: "ana@ops", Why: "the limit is raised"}
)

func to[T any](v T) *T { return &v }

// kind is one of the two tables, with what its tests need. Rows are numbered from 1 in the order in
// which they were inserted.
type kind[P comparable, R any, F queue.Filter] struct {
	*queue.Table[P, R, F]
	name, relation string
	number         string // the column with a row's number
	held, own      string // a state in which a row waits, and a reason for it
	insertSQL      string // number, key, reason, state; returns the place
	of             func(R) (place P, number int64)
	place          pgx.RowToFunc[P]
}

var dead = kind[queue.DeadPlace, queue.DeadRow, queue.DeadFilter]{
	Table: queue.Dead(schema), name: "dead", relation: "effectonce.outbox_dead", number: "seq", held: "held", own: "refused",
	insertSQL: `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, payload, headers, created_at, reason, error, state)
		VALUES ('default', $1::bigint, ('00000000-0000-0000-0000-' || lpad($1::bigint::text, 12, '0'))::uuid, 'orders', convert_to(nullif($2, '-'), 'UTF8'),
			convert_to('payload ' || $1::bigint, 'UTF8'), '{"type": "order"}', '2026-01-02 03:04:05Z', $3, 'error ' || $1::bigint, $4)
		RETURNING relay, seq`,
	of:    func(r queue.DeadRow) (queue.DeadPlace, int64) { return r.Place(), r.Seq },
	place: pgx.RowToStructByPos[queue.DeadPlace],
}

func at(seq int64) queue.DeadPlace { return queue.DeadPlace{Relay: "default", Seq: seq} }

var parked = kind[int64, queue.ParkedMessage, queue.ParkedFilter]{
	Table: queue.Parked(schema), name: "parked", relation: "effectonce.parked_messages", number: `"offset"`, held: "parked", own: "failed",
	insertSQL: `WITH consumer AS (
			INSERT INTO effectonce.consumers (name, consumer_group, topics) VALUES ('billing/orders', 'billing', '{orders}')
			ON CONFLICT (name) DO UPDATE SET consumer_group = 'billing' RETURNING id)
		INSERT INTO effectonce.parked_messages
			(consumer, message_id, topic, partition, "offset", key, payload, headers, record_time, reason, error, attempts, state)
		SELECT id, ('00000000-0000-0000-0000-' || lpad($1::bigint::text, 12, '0'))::uuid, 'orders', 0, $1::bigint, convert_to(nullif($2, '-'), 'UTF8'),
			convert_to('payload ' || $1::bigint, 'UTF8'), '{"type": "order"}', clock_timestamp(), $3, 'error ' || $1::bigint, 10, $4
		FROM consumer RETURNING seq`,
	of:    func(m queue.ParkedMessage) (int64, int64) { return m.Seq, m.Offset },
	place: pgx.RowTo[int64],
}

// insert inserts what the program would, each row as "key reason state", and returns the places. The
// key - is null, the reason own and the state held are the kind's. The ID of a row is 0…n, its
// payload "payload n", n being its number.
func (k kind[P, R, F]) insert(t *testing.T, conn *pgx.Conn, rows ...string) (places []P) {
	t.Helper()
	for i, row := range rows {
		var key, reason, state string
		_, err := fmt.Sscan(strings.NewReplacer(" own", " "+k.own, " held", " "+k.held).Replace(row), &key, &reason, &state)
		require.NoError(t, err)
		inserted, err := conn.Query(t.Context(), k.insertSQL, i+1, key, reason, state)
		require.NoError(t, err)
		place, err := pgx.CollectExactlyOneRow(inserted, k.place)
		require.NoError(t, err)
		places = append(places, place)
	}
	return places
}

// left lists what waits, each row as "n reason state".
func (k kind[P, R, F]) left(t *testing.T, conn *pgx.Conn) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), fmt.Sprintf("SELECT format('%%s %%s %%s', %[1]s, reason, state) FROM %[2]s ORDER BY seq, %[1]s", k.number, k.relation))
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

func (k kind[P, R, F]) retry(t *testing.T, conn *pgx.Conn, places ...P) *queue.Result[P] {
	t.Helper()
	result, err := k.Retry(t.Context(), conn, ana, places)
	require.NoError(t, err)
	return result
}

func (k kind[P, R, F]) discard(t *testing.T, conn *pgx.Conn, wholeKeys bool, places ...P) *queue.Result[P] {
	t.Helper()
	result, err := k.Discard(t.Context(), conn, ana, places, wholeKeys)
	require.NoError(t, err)
	return result
}

// numbers returns the rows that a filter selects. The list has the newest first, targets the oldest.
func (k kind[P, R, F]) numbers(t *testing.T, conn *pgx.Conn, filter F) (all []int64) {
	t.Helper()
	found, err := k.List(t.Context(), conn, filter, 100)
	require.NoError(t, err)
	targets, err := k.Targets(t.Context(), conn, filter, 100)
	require.NoError(t, err)
	require.Len(t, targets, len(found))
	for i, r := range found {
		place, number := k.of(r)
		require.Equal(t, place, targets[len(targets)-1-i])
		all = append(all, number)
	}
	slices.Reverse(all)
	return all
}

// succeed is a consumer that handles the first message that is handed back.
const succeed = `WITH handled AS (DELETE FROM effectonce.parked_messages
		WHERE seq = (SELECT seq FROM effectonce.parked_messages WHERE state = 'retry' ORDER BY seq LIMIT 1 FOR UPDATE)
		RETURNING seq, consumer, topic, partition, key)
	UPDATE effectonce.parked_messages p SET state = CASE p.reason WHEN 'behind' THEN 'retry' ELSE 'parked' END
	FROM handled h WHERE p.state = 'behind'
		AND p.seq = (SELECT min(n.seq) FROM effectonce.parked_messages n WHERE n.consumer = h.consumer AND n.topic = h.topic
			AND n.partition = h.partition AND n.key = h.key AND n.seq > h.seq)`
