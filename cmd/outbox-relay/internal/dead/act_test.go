package dead_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/dead"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/parked"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Row O10 of guarantees.md: only the first row of a key is handed back, and nothing twice; the rest
// is left as it was.
func TestRetryHandsHeadsBack(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	places := insertDead(t, conn, "a too_large held", "a behind behind", "b refused retry", "- unknown_topic held", "c behind behind", "d refused held")
	exec(t, conn, "UPDATE effectonce.outbox_dead SET relay = 'other' WHERE seq = 6")
	result := retry(t, conn, append(places, at(4711))...)
	assert.Equal(t, []string{"1 too_large retry", "2 behind behind", "3 refused retry", "4 unknown_topic retry", "5 behind retry", "6 refused held"}, left(t, conn),
		"row 5 has lost its head, and is one; row 6 is another relay's")
	assert.Len(t, result.Done, 3)
	assert.Len(t, result.Retrying, 1)
	require.Len(t, result.Behind, 1)
	assert.Equal(t, byte(2), result.Behind[0][15])
	again := retry(t, conn, places[0])
	assert.Empty(t, again.Done)
	assert.Len(t, again.Retrying, 1)
}

// Discarding the first row of a key hands the key on to the next, and changes nothing else: other
// keys and topics stay as they are. What the relay may be publishing is left alone.
func TestDiscardHandsTheKeyOn(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	places := insertDead(t, conn, "a too_large held", "a behind behind", "a behind behind", "b refused held", "b behind behind",
		"c refused retry", "c behind behind", "- refused held", "- refused held", "a refused held",
		"e refused held", "e refused held")
	exec(t, conn, "UPDATE effectonce.outbox_dead SET topic = 'payments' WHERE seq = 10")
	result := discard(t, conn, false, places[0], places[2], places[5], places[6], places[7], places[10])
	assert.Equal(t, []string{"2 behind retry", "3 behind behind", "4 refused held", "5 behind behind", "6 refused retry", "7 behind behind", "9 refused held", "10 refused held", "12 refused held"}, left(t, conn))
	assert.Len(t, result.Done, 3)
	assert.Equal(t, int64(1), result.Released)
	assert.Len(t, result.Behind, 2)
	require.Len(t, result.Retrying, 1)
	assert.Equal(t, byte(6), result.Retrying[0][15])

	whole := discard(t, conn, true, places[1], places[3], places[5], places[8])
	assert.Equal(t, []string{"2 behind retry", "3 behind behind", "6 refused retry", "7 behind behind", "10 refused held", "12 refused held"}, left(t, conn),
		"of a key that was handed back nothing is given up")
	assert.Len(t, whole.Done, 3)
	assert.Zero(t, whole.Released)
}

// Every retry and discard is recorded with who, why and what it was, in the same transaction, and
// without payload or headers.
func TestActionsAreWrittenDown(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	places := insertDead(t, conn, "a too_large held", "a behind behind", "- refused held")
	exec(t, conn, `UPDATE effectonce.outbox_dead SET key = '\x00ff' WHERE key IS NOT NULL`)
	retry(t, conn, places[2])
	discard(t, conn, true, places[0])
	actions, err := parked.Actions(t.Context(), conn, schema, parked.ActionFilter{}, 100)
	require.NoError(t, err)
	var said []string
	for _, a := range actions {
		said = append(said, a.What+" "+a.Object()[35:])
		assert.Equal(t, ana.Who, *a.Stated)
		assert.Equal(t, conn.Config().User, a.Who)
		assert.Equal(t, ana.Why, a.Why)
		assert.NotContains(t, string(a.Subject), "payload")
	}
	assert.Equal(t, []string{"dead.discard 2", "dead.discard 1", "dead.retry 3"}, said)
	var subject map[string]any
	require.NoError(t, json.Unmarshal(actions[1].Subject, &subject))
	assert.Equal(t, map[string]any{
		"relay": "default", "seq": 1.0, "message_id": "00000000-0000-0000-0000-000000000001", "topic": "orders", "key": "base64:AP8=",
		"reason": "too_large", "error": "error 1", "attempts": 1.0, "state": "held", "created_at": subject["created_at"],
	}, subject)
	created, err := time.Parse(time.RFC3339, subject["created_at"].(string))
	require.NoError(t, err)
	assert.Equal(t, 2026, created.Year())

	// An action that cannot be recorded is not done.
	exec(t, conn, "ALTER TABLE effectonce.operator_actions ADD CHECK (stated <> 'ana@ops') NOT VALID")
	exec(t, conn, "UPDATE effectonce.outbox_dead SET state = 'held'")
	before := left(t, conn)
	_, err = dead.Retry(t.Context(), conn, schema, ana, places)
	require.Error(t, err)
	_, err = dead.Discard(t.Context(), conn, schema, ana, places, true)
	require.Error(t, err)
	assert.Equal(t, before, left(t, conn))
}

// What the relay decides first counts: an action that waited for the relay checks again. So a row
// that was released in between, because its topic exists now, is not discarded while the relay
// publishes it. That also holds for a role whose transactions would not see it by default.
func TestReleasedInTheMiddleIsNotDiscarded(t *testing.T) {
	t.Parallel()
	for name, wholeKeys := range map[string]bool{"row": false, "whole key": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			address := pgtest.Database(t)
			relay, operator, look := connect(t, address), connect(t, address), connect(t, address)
			exec(t, operator, "SET default_transaction_isolation = 'repeatable read'")
			places := insertDead(t, look, "a unknown_topic held", "a behind behind")
			exec(t, relay, "BEGIN")
			exec(t, relay, "UPDATE effectonce.outbox_dead SET state = 'retry' WHERE reason = 'unknown_topic' AND state = 'held'")
			var result *dead.Result
			done := make(chan error)
			go func() {
				var err error
				result, err = dead.Discard(t.Context(), operator, schema, ana, places[:1], wholeKeys)
				done <- err
			}()
			pgtest.Blocked(t, look, relay)
			exec(t, relay, "COMMIT")
			require.NoError(t, <-done)
			assert.Empty(t, result.Done)
			assert.Len(t, result.Retrying, 1)
			assert.Equal(t, []string{"1 unknown_topic retry", "2 behind behind"}, left(t, look))
		})
	}
}

// A deadlock costs another try, not the action.
func TestDeadlockIsTriedAgain(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	other, operator, look := connect(t, address), connect(t, address), connect(t, address)
	exec(t, other, "SET deadlock_timeout = '1h'")
	exec(t, operator, "SET deadlock_timeout = '10s'")
	places := insertDead(t, look, "a refused held", "b refused held")
	exec(t, other, "BEGIN")
	exec(t, other, "SELECT FROM effectonce.outbox_dead WHERE seq = 2 FOR UPDATE")
	var result *dead.Result
	done := make(chan error)
	go func() {
		var err error
		result, err = dead.Retry(context.WithoutCancel(t.Context()), operator, schema, ana, places)
		done <- err
	}()
	pgtest.Blocked(t, look, other)
	exec(t, other, "SELECT FROM effectonce.outbox_dead WHERE seq = 1 FOR UPDATE")
	exec(t, other, "COMMIT")
	require.NoError(t, <-done)
	assert.Len(t, result.Done, 2)
}
