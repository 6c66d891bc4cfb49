package held_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/held"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const schema = "effectonce"

var (
	connect = pgtest.Connect
	exec    = pgtest.Exec
	ana     = operator.By{Who: "ana@ops", Why: "the limit is raised"}
	retry   = held.Decision{By: ana}
	discard = held.Decision{By: ana, Discard: true}
	whole   = held.Decision{By: ana, Discard: true, WholeKeys: true}
)

func to[T any](v T) *T { return &v }

// kind is one of the two tables, with what its tests need. Rows are numbered from 1 in the order in
// which they were inserted, and seq is that number.
type kind struct {
	held.Kind
	relation, since string // the table, and its column of the time at which a row was held
	held, own       string // a state in which a row waits, and a reason for it
	insertSQL       string // number, key, reason, state; returns the ref
}

var (
	dead = kind{
		Kind: held.Dead, relation: "effectonce.outbox_dead", since: "died_at", held: "held", own: "refused",
		insertSQL: `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, payload, headers, created_at, reason, error, state)
		VALUES ('default', $1::bigint, ('00000000-0000-0000-0000-' || lpad($1::bigint::text, 12, '0'))::uuid, 'orders', convert_to(nullif($2, '-'), 'UTF8'),
			convert_to('payload ' || $1::bigint, 'UTF8'), '{"type": "order"}', '2026-01-02 03:04:05Z', $3, 'error ' || $1::bigint, $4)
		RETURNING relay, seq`,
	}
	parked = kind{
		Kind: held.Parked, relation: "effectonce.parked_messages", since: "parked_at", held: "parked", own: "failed",
		insertSQL: `WITH consumer AS (
			INSERT INTO effectonce.consumers (name, consumer_group, topics) VALUES ('billing/orders', 'billing', '{orders}')
			ON CONFLICT (name) DO UPDATE SET consumer_group = 'billing' RETURNING id)
		INSERT INTO effectonce.parked_messages
			(consumer, message_id, topic, partition, "offset", key, payload, headers, record_time, reason, error, attempts, state)
		SELECT id, ('00000000-0000-0000-0000-' || lpad($1::bigint::text, 12, '0'))::uuid, 'orders', 0, $1::bigint, convert_to(nullif($2, '-'), 'UTF8'),
			convert_to('payload ' || $1::bigint, 'UTF8'), '{"type": "order"}', clock_timestamp(), $3, 'error ' || $1::bigint, 10, $4
		FROM consumer RETURNING '', seq`,
	}
)

// ofBoth runs a test with each kind.
func ofBoth(t *testing.T, test func(*testing.T, kind)) {
	t.Helper()
	for _, k := range []kind{dead, parked} {
		t.Run(string(k.Kind), func(t *testing.T) {
			t.Parallel()
			test(t, k)
		})
	}
}

// in fills the kind's words into a text: the reason own and the state held.
func (k kind) in(text string) string {
	return strings.NewReplacer(" own", " "+k.own, " held", " "+k.held).Replace(text)
}

// insert inserts what the program would, each row as "key reason state", and returns the refs. The
// key - is null. The ID of a row is 0…n, its payload "payload n", n being its number.
func (k kind) insert(t *testing.T, conn *pgx.Conn, rows ...string) (refs []held.Ref) {
	t.Helper()
	for i, row := range rows {
		var key, reason, state string
		_, err := fmt.Sscan(k.in(row), &key, &reason, &state)
		require.NoError(t, err)
		inserted, err := conn.Query(t.Context(), k.insertSQL, i+1, key, reason, state)
		require.NoError(t, err)
		ref, err := pgx.CollectExactlyOneRow(inserted, pgx.RowToStructByPos[held.Ref])
		require.NoError(t, err)
		refs = append(refs, ref)
	}
	return refs
}

// left lists what waits, each row as "n reason state".
func (k kind) left(t *testing.T, conn *pgx.Conn) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), "SELECT format('%s %s %s', seq, reason, state) FROM "+k.relation+" WHERE state NOT IN ('discard', 'discarded') ORDER BY seq")
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

func (k kind) act(t *testing.T, conn *pgx.Conn, o held.Decision, refs ...held.Ref) *held.Result {
	t.Helper()
	result, err := k.Act(t.Context(), conn, schema, o, refs)
	require.NoError(t, err)
	return result
}

// numbers returns the rows that a filter selects. The list has the newest first, targets the oldest.
func (k kind) numbers(t *testing.T, conn *pgx.Conn, filter held.Filter) (all []int64) {
	t.Helper()
	found, err := k.List(t.Context(), conn, schema, filter, 100)
	require.NoError(t, err)
	targets, err := k.Targets(t.Context(), conn, schema, filter, 100)
	require.NoError(t, err)
	require.Len(t, targets, len(found))
	for i, r := range slices.Backward(found) {
		require.Equal(t, r.Ref, targets[len(targets)-1-i])
		all = append(all, r.Seq)
	}
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
