package held_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/held"
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

// Discarding the first row of a key hands the key on to the next, and changes nothing else: other
// keys and topics stay as they are. What the relay may be publishing is left alone.
func TestDiscardHandsTheKeyOn(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	places := dead.insert(t, conn, "a too_large held", "a behind behind", "a behind behind", "b refused held", "b behind behind",
		"c refused retry", "c behind behind", "- refused held", "- refused held", "a refused held",
		"e refused held", "e refused held")
	exec(t, conn, "UPDATE effectonce.outbox_dead SET topic = 'payments' WHERE seq = 10")
	result := dead.act(t, conn, discard, places[0], places[2], places[5], places[6], places[7], places[10])
	assert.Equal(t, []string{"2 behind retry", "3 behind behind", "4 refused held", "5 behind behind", "6 refused retry", "7 behind behind", "9 refused held", "10 refused held", "12 refused held"}, dead.left(t, conn))
	assert.Len(t, result.Done, 3)
	assert.Equal(t, int64(1), result.Released)
	assert.Len(t, result.Behind, 2)
	require.Len(t, result.Retrying, 1)
	assert.Equal(t, byte(6), result.Retrying[0].ID[15])

	gone := dead.act(t, conn, whole, places[1], places[3], places[5], places[8])
	assert.Equal(t, []string{"2 behind retry", "3 behind behind", "6 refused retry", "7 behind behind", "10 refused held", "12 refused held"}, dead.left(t, conn),
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
		order          held.Order
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
