package held_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/held"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// Rows O10 and C15 of guarantees.md: only the first row of a key is handed back, nothing twice, and
// no message without a payload; the rest is left as it was.
func TestRetryHandsHeadsBack(t *testing.T) {
	t.Parallel()
	ofBoth(t, func(t *testing.T, k kind) {
		t.Helper()
		conn := connect(t, pgtest.Database(t))
		refs := k.insert(t, conn, "a own held", "a behind behind", "b own retry", "- own held", "c behind behind", "d too_large held")
		if k == parked {
			exec(t, conn, "UPDATE effectonce.parked_messages SET retry_at = 'epoch', released_at = 'epoch'")
		} else {
			exec(t, conn, "UPDATE effectonce.outbox_dead SET relay = 'other' WHERE seq = 6")
		}
		result := k.act(t, conn, retry, append(refs, held.Ref{Relay: refs[0].Relay, Seq: 4711})...)
		assert.Equal(t, []string{"1 " + k.own + " retry", "2 behind behind", "3 " + k.own + " retry", "4 " + k.own + " retry", "5 behind retry", k.in("6 too_large held")}, k.left(t, conn),
			"row 5 has lost its head, and is one")
		assert.Len(t, result.Done, 3)
		assert.Len(t, result.Retrying, 1)
		require.Len(t, result.Behind, 1)
		assert.Equal(t, byte(2), result.Behind[0][15])
		if k == parked {
			require.Len(t, result.NoPayload, 1)
			assert.Equal(t, byte(6), result.NoPayload[0][15])
			var due bool
			require.NoError(t, conn.QueryRow(t.Context(), `SELECT bool_and(retry_at > clock_timestamp() - interval '1 minute' AND released_at IS NULL)
				FROM effectonce.parked_messages WHERE seq IN (1, 4, 5)`).Scan(&due))
			assert.True(t, due, "handed back means due now, with a new time of release")
		}
		again := k.act(t, conn, retry, refs[0])
		assert.Empty(t, again.Done)
		assert.Len(t, again.Retrying, 1)
	})
}

// Discarding the first row of a key marks it for the relay, and changes nothing else: other keys and
// topics stay as they are. What the relay may be publishing is left alone.
func TestDiscardMarksTheRow(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	places := dead.insert(t, conn, "a too_large held", "a behind behind", "a behind behind", "b refused held", "b behind behind",
		"c refused retry", "c behind behind", "- refused held", "- refused held", "a refused held",
		"e refused held", "e refused held")
	exec(t, conn, "UPDATE effectonce.outbox_dead SET topic = 'payments' WHERE seq = 10")
	result := dead.act(t, conn, discard, places[0], places[2], places[5], places[6], places[7], places[10])
	assert.Equal(t, []string{"2 behind behind", "3 behind behind", "4 refused held", "5 behind behind", "6 refused retry", "7 behind behind", "9 refused held", "10 refused held", "12 refused held"}, dead.left(t, conn))
	assert.Len(t, result.Done, 3)
	assert.Equal(t, int64(1), result.Released)
	assert.Len(t, result.Behind, 2)
	require.Len(t, result.Retrying, 1)
	assert.Equal(t, byte(6), result.Retrying[0].ID[15])

	gone := dead.act(t, conn, whole, places[1], places[3], places[5], places[8])
	assert.Equal(t, []string{"2 behind behind", "3 behind behind", "6 refused retry", "7 behind behind", "10 refused held", "12 refused held"}, dead.left(t, conn),
		"of a key that was handed back nothing is given up")
	assert.Len(t, gone.Done, 3)
	assert.Zero(t, gone.Released)
}

// Discarding the first message of a key lets the rest continue in order, and nothing else: messages
// that only waited are handed back, messages with a reason of their own wait for an operator, other
// keys are unchanged.
func TestDiscardReleasesTheNext(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	seqs := parked.insert(t, conn, "a failed parked", "a behind behind", "a behind behind", "b failed parked", "b expired behind", "b behind behind",
		"c failed retry", "- failed parked", "- failed parked", "d failed parked", "d behind behind")
	result := parked.act(t, conn, discard, seqs[0], seqs[2], seqs[3], seqs[6], seqs[7])
	assert.Equal(t, []string{"2 behind retry", "3 behind behind", "5 expired parked", "6 behind behind", "9 failed parked", "10 failed parked", "11 behind behind"}, parked.left(t, conn))
	assert.Len(t, result.Done, 4)
	assert.Equal(t, int64(2), result.Released)
	require.Len(t, result.Behind, 1)
	assert.Equal(t, byte(3), result.Behind[0][15])

	gone := parked.act(t, conn, whole, seqs[4], seqs[8], seqs[9])
	assert.Equal(t, []string{"2 behind retry", "3 behind behind"}, parked.left(t, conn))
	assert.Len(t, gone.Done, 5)
	assert.Empty(t, parked.act(t, conn, whole, seqs...).Behind)
	assert.Empty(t, parked.left(t, conn))
}

// If a consumer keeps no order, messages of one key are parked beside each other: each is acted on
// alone.
func TestMessagesWithoutOrderStandAlone(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	seqs := parked.insert(t, conn, "a failed parked", "a failed retry", "a failed parked", "a failed parked")
	assert.Zero(t, parked.act(t, conn, discard, seqs[0]).Released)
	assert.Equal(t, []string{"2 failed retry", "3 failed parked", "4 failed parked"}, parked.left(t, conn))
	assert.Len(t, parked.act(t, conn, retry, seqs[3]).Done, 1)
	assert.Len(t, parked.act(t, conn, discard, seqs[2]).Done, 1)
	assert.Equal(t, []string{"2 failed retry", "4 failed retry"}, parked.left(t, conn))
}

// What the program decides first counts: an action that waited for it checks again. So a row that
// was released in between, because its topic exists now, is not discarded while the relay publishes
// it, and of a message that a consumer handled the action finds what remains. That also holds for a
// role whose transactions would not see it by default.
func TestProgramInTheMiddleWins(t *testing.T) {
	t.Parallel()
	const released = "UPDATE effectonce.outbox_dead SET state = 'retry' WHERE reason = 'unknown_topic' AND state = 'held'"
	for name, c := range map[string]struct {
		k              kind
		order          held.Decision
		program        string
		rows, left     []string
		done, retrying int
	}{
		"dead row":     {dead, discard, released, []string{"a unknown_topic held", "a behind behind"}, []string{"1 unknown_topic retry", "2 behind behind"}, 0, 1},
		"dead key":     {dead, whole, released, []string{"a unknown_topic held", "a behind behind"}, []string{"1 unknown_topic retry", "2 behind behind"}, 0, 1},
		"parked retry": {parked, retry, succeed, []string{"a failed retry", "a behind behind", "a behind behind"}, []string{"2 behind retry", "3 behind behind"}, 0, 0},
		"parked key":   {parked, whole, succeed, []string{"a failed retry", "a behind behind", "a behind behind"}, nil, 2, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			address := pgtest.Database(t)
			holder, person, look := connect(t, address), connect(t, address), connect(t, address)
			exec(t, person, "SET default_transaction_isolation = 'repeatable read'")
			refs := c.k.insert(t, look, c.rows...)
			exec(t, holder, "BEGIN")
			exec(t, holder, c.program)
			var result *held.Result
			done := make(chan error, 1)
			go func() {
				var err error
				result, err = c.k.Act(t.Context(), person, schema, c.order, refs[:1])
				done <- err
			}()
			pgtest.Blocked(t, look, holder)
			exec(t, holder, "COMMIT")
			require.NoError(t, testwait.Chan(t, "the operator's action", done))
			assert.Len(t, result.Done, c.done)
			assert.Len(t, result.Retrying, c.retrying)
			assert.ElementsMatch(t, c.left, c.k.left(t, look))
		})
	}
}

// Each filter selects only what it names, and only heads unless the rows behind them are requested.
func TestFiltersNarrow(t *testing.T) {
	t.Parallel()
	ofBoth(t, func(t *testing.T, k kind) {
		t.Helper()
		conn := connect(t, pgtest.Database(t))
		refs := k.insert(t, conn, "a own held", "a behind behind", "b too_large held", "- own retry", "c behind behind")
		of, other := "default", held.Filter{Relay: to("other")}
		if k == parked {
			of, other = "billing/orders", held.Filter{Group: to("audit"), Consumer: to("audit/payments")}
			exec(t, conn, "INSERT INTO effectonce.consumers (name, consumer_group, topics) VALUES ('audit/payments', 'audit', '{payments}')")
			exec(t, conn, `UPDATE effectonce.parked_messages SET topic = 'payments', consumer = (SELECT id FROM effectonce.consumers WHERE consumer_group = 'audit') WHERE seq = 3`)
		} else {
			exec(t, conn, "UPDATE effectonce.outbox_dead SET topic = 'payments', relay = 'other' WHERE seq = 3")
		}
		exec(t, conn, "UPDATE "+k.relation+" SET "+k.since+" = clock_timestamp() - interval '2 hours' WHERE seq = 4")
		for name, c := range map[string]struct {
			filter held.Filter
			want   []int64
		}{
			"none":           {held.Filter{}, []int64{1, 3, 4, 5}},
			"behind too":     {held.Filter{Behind: true}, []int64{1, 2, 3, 4, 5}},
			"other key":      {held.Filter{Key: human.Key{}}, nil},
			"seqs":           {held.Filter{Seqs: []int64{1, 2}}, []int64{1}},
			"no seqs at all": {held.Filter{Seqs: []int64{}}, nil},
			"two at once":    {held.Filter{Reason: to(k.own), OlderThan: to(time.Hour)}, []int64{4}},
			"of another":     {other, []int64{3}},
		} {
			assert.ElementsMatch(t, c.want, k.numbers(t, conn, c.filter), name)
		}

		found, err := k.List(t.Context(), conn, schema, held.Filter{Behind: true}, 100)
		require.NoError(t, err)
		first, behind := found[4], found[3]
		assert.Equal(t, refs[0], first.Ref)
		assert.Equal(t, int64(1), first.Behind)
		assert.Nil(t, first.Head)
		assert.Equal(t, first.ID, *behind.Head)
		assert.Nil(t, found[0].Head, "it has lost its head")
		assert.Equal(t, k == parked, found[1].RetryInSeconds != nil)
		assert.Nil(t, first.RetryInSeconds)
		assert.Equal(t, map[kind]string{dead: "seq 1", parked: "orders/0/1"}[k], first.At())
		totals, err := k.Totals(t.Context(), conn, schema, held.Filter{Topic: to("orders")})
		require.NoError(t, err)
		assert.Equal(t, []held.Total{{of, "behind", 2, 0, 0}, {of, k.own, 2, 1, 1}}, totals)
	})
}

// A message is found by what a person knows of it: the ID in the log, the ID that the producer
// gave, or the record's place in Kafka.
func TestFindTakesWhatAPersonHas(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	parked.insert(t, conn, "a failed parked", "b failed parked", "c failed parked", "d failed parked")
	exec(t, conn, "UPDATE effectonce.parked_messages SET message_id = effectonce.message_id('orders', 'order-4711') WHERE seq = $1", 2)
	exec(t, conn, "UPDATE effectonce.parked_messages SET message_id = effectonce.message_id('', '01ARZ3NDEKTSV4RRFFQ69G5FAV') WHERE seq = $1", 3)
	const v4 = "0b3d4a52-0c63-4f0e-8a1f-6d1df8e6b9a5"
	exec(t, conn, "UPDATE effectonce.parked_messages SET message_id = effectonce.message_id('orders', $2) WHERE seq = $1", 4, v4)
	found := func(text string) []int64 {
		filter := held.Filter{Name: text}
		require.NoError(t, filter.Find(t.Context(), conn, schema))
		return filter.Seqs
	}
	for text, want := range map[string]int64{
		"00000000-0000-0000-0000-000000000001": 1,
		"orders/0/1":                           1,
		"order-4711":                           2,
		"01arz3ndektsv4rrffq69g5fav":           3,
		v4:                                     4,
	} {
		assert.Equal(t, []int64{want}, found(text), text)
	}
	for _, text := range []string{"order-4712", "orders/1/1", "orders/0/x", "payments/0/1", "'; --"} {
		assert.Equal(t, []int64{}, found(text), text)
	}
}

// Everything about a row is shown; of long columns only a part.
func TestShowHasEverything(t *testing.T) {
	t.Parallel()
	ofBoth(t, func(t *testing.T, k kind) {
		t.Helper()
		conn := connect(t, pgtest.Database(t))
		refs := k.insert(t, conn, slices.Insert(slices.Repeat([]string{"a behind behind"}, 21), 0, "a own held")...)
		for range 21 {
			k.act(t, conn, retry, refs[0])
			exec(t, conn, "UPDATE "+k.relation+" SET state = $1 WHERE state = 'retry'", k.held)
		}
		d, err := k.Show(t.Context(), conn, schema, refs[0], 3)
		require.NoError(t, err)
		assert.Equal(t, "pay", string(d.Payload))
		assert.Equal(t, int64(9), *d.PayloadBytes)
		assert.JSONEq(t, `{"type": "order"}`, string(d.Headers))
		exec(t, conn, "UPDATE "+k.relation+` SET headers = '{"type": 12345678901234567890, "X-Auth-Token": ["CANARY"], "DB-Password": "CANARY"}'`)
		d, err = k.Show(t.Context(), conn, schema, refs[0], 3)
		require.NoError(t, err)
		assert.JSONEq(t, `{"type": 12345678901234567890, "X-Auth-Token": "(hidden)", "DB-Password": "(hidden)"}`, string(d.Headers))
		assert.Equal(t, int64(21), d.Behind)
		require.Len(t, d.Next, 20)
		assert.Equal(t, refs[1], d.Next[0].Ref)
		assert.Len(t, d.Actions, 20)
		_, err = k.Show(t.Context(), conn, schema, held.Ref{Relay: "other", Seq: 1}, 3)
		require.ErrorIs(t, err, held.ErrNotFound)
	})
}

// sections returns the sections of docs/runbook.md by title.
func sections(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile("../../../../docs/runbook.md")
	require.NoError(t, err)
	byTitle := map[string]string{}
	for _, section := range regexp.MustCompile(`(?m)^##+ `).Split(string(text), -1) {
		title, body, _ := strings.Cut(section, "\n")
		byTitle[title] = body
	}
	return byTitle
}

// statements returns the SQL of a section.
func statements(section string) (all []string) {
	for _, block := range regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(section, -1) {
		all = append(all, block[1])
	}
	return all
}

// The documentation for operators has every reason.
func TestEveryReasonIsDocumented(t *testing.T) {
	t.Parallel()
	for title, k := range map[string]kind{"Dead rows": dead, "Parked messages": parked} {
		for _, reason := range k.Reasons() {
			assert.Contains(t, sections(t)[title], "\n| `"+reason+"` | ")
		}
	}
}

// The documented SQL fixes a row in its place.
func TestDeadDocumentedSQLDoesWhatItSays(t *testing.T) {
	t.Parallel()
	blocks := statements(sections(t)["Dead rows"])
	require.Len(t, blocks, 1)

	conn := connect(t, pgtest.Database(t))
	dead.insert(t, conn, "a bad_headers held", "a behind behind", "b refused retry")
	exec(t, conn, "UPDATE effectonce.outbox_dead SET seq = seq + 4710")
	exec(t, conn, blocks[0])
	var repaired int
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM effectonce.outbox_dead WHERE headers ? 'trace'").Scan(&repaired))
	assert.Equal(t, 1, repaired)
}

// The documented SQL forgets the positions of a group, and records it.
func TestDocumentedSQLForgetsAGroup(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, "INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition) VALUES ('billing-old', 't', 0)")
	forget := statements(sections(t)["A group that is gone holds retention back"])
	require.Len(t, forget, 1)
	exec(t, conn, forget[0])
	var positions, written int
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT (SELECT count(*) FROM effectonce.consumer_positions), (SELECT count(*) FROM effectonce.operator_actions)").Scan(&positions, &written))
	assert.Zero(t, positions)
	assert.Equal(t, 1, written)
}
