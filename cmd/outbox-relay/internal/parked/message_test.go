package parked_test

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/parked"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func offsets(t *testing.T, conn *pgx.Conn, filter parked.Filter) (all []int64) {
	t.Helper()
	found, err := parked.List(t.Context(), conn, schema, filter, 100)
	require.NoError(t, err)
	targets, err := parked.Targets(t.Context(), conn, schema, filter, 100)
	require.NoError(t, err)
	require.Len(t, targets, len(found))
	for i, m := range found {
		require.Equal(t, m.Seq, targets[len(targets)-1-i], "the newest first is the other way round")
		all = append(all, m.Offset)
	}
	slices.Reverse(all)
	return all
}

func to[T any](v T) *T { return &v }

// Each filter selects only what it names, and only heads unless the messages behind them are
// requested.
func TestFiltersNarrow(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	seqs := park(t, conn, "a failed parked", "a behind behind", "b permanent parked", "- failed retry", "c behind behind")
	exec(t, conn, "INSERT INTO effectonce.consumers (name, consumer_group, topics) VALUES ('audit/payments', 'audit', '{payments}')")
	exec(t, conn, `UPDATE effectonce.parked_messages SET topic = 'payments', consumer = (SELECT id FROM effectonce.consumers WHERE consumer_group = 'audit')
		WHERE seq = $1`, seqs[2])
	exec(t, conn, "UPDATE effectonce.parked_messages SET parked_at = clock_timestamp() - interval '2 hours' WHERE seq = $1", seqs[3])
	for name, c := range map[string]struct {
		filter parked.Filter
		want   []int64
	}{
		"none":           {parked.Filter{}, []int64{1, 3, 4, 5}},
		"behind too":     {parked.Filter{Behind: true}, []int64{1, 2, 3, 4, 5}},
		"key":            {parked.Filter{Key: parked.Key("a")}, []int64{1}},
		"other key":      {parked.Filter{Key: parked.Key{}}, nil},
		"topic":          {parked.Filter{Topic: to("payments")}, []int64{3}},
		"consumer":       {parked.Filter{Consumer: to("billing/orders")}, []int64{1, 4, 5}},
		"group":          {parked.Filter{Group: to("audit")}, []int64{3}},
		"reason":         {parked.Filter{Reason: to("failed")}, []int64{1, 4}},
		"older":          {parked.Filter{OlderThan: to(time.Hour)}, []int64{4}},
		"younger":        {parked.Filter{YoungerThan: to(time.Hour)}, []int64{1, 3, 5}},
		"seqs":           {parked.Filter{Seqs: seqs[:2]}, []int64{1}},
		"no seqs at all": {parked.Filter{Seqs: []int64{}}, nil},
		"two at once":    {parked.Filter{Reason: to("failed"), OlderThan: to(time.Hour)}, []int64{4}},
	} {
		assert.Equal(t, c.want, offsets(t, conn, c.filter), name)
	}

	found, err := parked.List(t.Context(), conn, schema, parked.Filter{Behind: true}, 100)
	require.NoError(t, err)
	behind, first := found[3], found[4]
	assert.Equal(t, int64(1), first.Behind)
	assert.Nil(t, first.Head)
	assert.Equal(t, first.ID, *behind.Head)
	assert.Equal(t, "orders/0/1", first.At())
	assert.Nil(t, found[0].Head, "it has lost its head")
	assert.NotNil(t, found[1].RetryInSeconds)
	assert.Nil(t, first.RetryInSeconds)
	assert.InDelta(t, 7200, found[1].AgeSeconds, 60)
	assert.Equal(t, int64(9), *first.PayloadBytes)
	text, err := json.Marshal(found[1])
	require.NoError(t, err)
	assert.Contains(t, string(text), `"key":null`)

	totals, err := parked.Totals(t.Context(), conn, schema, parked.Filter{Topic: to("orders")})
	require.NoError(t, err)
	assert.Equal(t, []parked.Total{{"billing/orders", "behind", 2, 0, 0}, {"billing/orders", "failed", 2, 1, 1}}, totals)
}

// A message is found by what a person knows of it: the ID in the log, the ID that the producer
// gave, or the record's place in Kafka.
func TestFindTakesWhatAPersonHas(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	seqs := park(t, conn, "a failed parked", "b failed parked", "c failed parked", "d failed parked")
	exec(t, conn, "UPDATE effectonce.parked_messages SET message_id = effectonce.message_id('orders', 'order-4711') WHERE seq = $1", seqs[1])
	exec(t, conn, "UPDATE effectonce.parked_messages SET message_id = effectonce.message_id('', '01ARZ3NDEKTSV4RRFFQ69G5FAV') WHERE seq = $1", seqs[2])
	const v4 = "0b3d4a52-0c63-4f0e-8a1f-6d1df8e6b9a5"
	exec(t, conn, "UPDATE effectonce.parked_messages SET message_id = effectonce.message_id('orders', $2) WHERE seq = $1", seqs[3], v4)
	for text, want := range map[string]int64{
		"00000000-0000-0000-0000-000000000001": seqs[0],
		"orders/0/1":                           seqs[0],
		"order-4711":                           seqs[1],
		"01arz3ndektsv4rrffq69g5fav":           seqs[2],
		v4:                                     seqs[3],
	} {
		found, err := parked.Find(t.Context(), conn, schema, text)
		require.NoError(t, err, text)
		assert.Equal(t, []int64{want}, found, text)
	}
	for _, text := range []string{"order-4712", "orders/1/1", "orders/0/x", "payments/0/1", "'; --"} {
		_, err := parked.Find(t.Context(), conn, schema, text)
		require.ErrorIs(t, err, parked.ErrNotFound, text)
	}
}

// Everything about a message is shown; of long columns only a part.
func TestShowHasEverything(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	rows := []string{"a failed parked"}
	for range 30 {
		rows = append(rows, "a behind behind")
	}
	seqs := park(t, conn, rows...)
	for range 25 {
		retry(t, conn, seqs[0])
		exec(t, conn, fail)
	}
	d, err := parked.Show(t.Context(), conn, schema, seqs[0], 3)
	require.NoError(t, err)
	assert.Equal(t, "pay", string(d.Payload))
	assert.Equal(t, int64(9), *d.PayloadBytes)
	assert.JSONEq(t, `{"type": "order"}`, string(d.Headers))
	assert.Equal(t, int64(30), d.Behind)
	require.Len(t, d.Next, 20)
	assert.Equal(t, int64(2), d.Next[0].Offset)
	assert.Len(t, d.Actions, 20)
	_, err = parked.Show(t.Context(), conn, schema, 4711, 3)
	require.ErrorIs(t, err, parked.ErrNotFound)
}

// Every reason that the schema knows has advice of its own.
func TestEveryReasonHasAdvice(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	var check string
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = 'parked_messages_reason_is_unknown'").Scan(&check))
	var reasons []string
	for _, quoted := range regexp.MustCompile(`'\w+'`).FindAllString(check, -1) {
		reasons = append(reasons, strings.Trim(quoted, "'"))
	}
	assert.ElementsMatch(t, reasons, parked.Reasons())
	said := map[parked.Advice]string{parked.AdviceFor("no such reason"): "no such reason"}
	for _, reason := range reasons {
		advice := parked.AdviceFor(reason)
		assert.Empty(t, said[advice], "%s has the advice of another", reason)
		said[advice] = reason
	}
}

// Statements that run for every action, or at every look of a waiting operator, read only the rows
// that they need, however many are parked.
func TestStatementsDoNotReadTheWholeTable(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	park(t, conn, "a failed parked")
	exec(t, conn, `INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", key, reason, error, state)
		SELECT id, gen_random_uuid(), 'orders', 0, 100 + n, convert_to('key ' || n % 1000, 'UTF8'),
			CASE WHEN n < 1000 THEN 'failed' ELSE 'behind' END, 'e', CASE WHEN n < 1000 THEN 'parked' ELSE 'behind' END
		FROM effectonce.consumers, generate_series(0, 19999) n`)
	exec(t, conn, "ANALYZE effectonce.parked_messages")
	targets, err := parked.Targets(t.Context(), conn, schema, parked.Filter{Key: parked.Key("key 7")}, 10)
	require.NoError(t, err)
	for name, plan := range parked.Plans(t, conn, schema, targets) {
		assert.NotContains(t, plan, "Seq Scan on parked_messages", "%s\n%s", name, plan)
		for _, touched := range regexp.MustCompile(`actual rows=(\d+)`).FindAllStringSubmatch(plan, -1) {
			var rows int
			_, err := fmt.Sscan(touched[1], &rows)
			require.NoError(t, err)
			assert.LessOrEqual(t, rows, 25, "%s\n%s", name, plan)
		}
	}
}
