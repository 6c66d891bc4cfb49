package parked_test

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/parked"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Row C15 of guarantees.md: only the first message of a key is handed back, nothing twice, and
// nothing that has no payload; the rest is left as it was.
func TestRetryHandsHeadsBack(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	seqs := park(t, conn, "a failed parked", "a behind behind", "b failed retry", "c too_large parked", "- permanent parked", "d behind behind")
	exec(t, conn, "UPDATE effectonce.parked_messages SET retry_at = 'epoch', released_at = 'epoch'")
	result := retry(t, conn, append(seqs, 4711)...)
	assert.Equal(t, []string{"1 failed retry", "2 behind behind", "3 failed retry", "4 too_large parked", "5 permanent retry", "6 behind retry"}, left(t, conn),
		"row 6 has lost its head, and is one")
	assert.Len(t, result.Done, 3)
	assert.Equal(t, 1, result.Retrying)
	require.Len(t, result.NoPayload, 1)
	assert.Equal(t, seqs[3], result.NoPayload[0].Seq)
	require.Len(t, result.Behind, 1)
	assert.Equal(t, seqs[1], result.Behind[0].Seq)
	var due bool
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT bool_and(retry_at > clock_timestamp() - interval '1 minute' AND released_at IS NULL)
		FROM effectonce.parked_messages WHERE seq = ANY ($1)`, []int64{seqs[0], seqs[4], seqs[5]}).Scan(&due))
	assert.True(t, due, "handed back means due now, with a new time of release")

	again := retry(t, conn, seqs[0])
	assert.Empty(t, again.Done)
	assert.Equal(t, 1, again.Retrying)
}

// Discarding the first message of a key lets the rest continue in order, and nothing else: messages
// that only waited are handed back, messages with a reason of their own wait for an operator, other
// keys are unchanged.
func TestDiscardReleasesTheNext(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	seqs := park(t, conn, "a failed parked", "a behind behind", "a behind behind", "b failed parked", "b expired behind", "b behind behind",
		"c failed retry", "- failed parked", "- failed parked", "d failed parked", "d behind behind")
	result := discard(t, conn, false, seqs[0], seqs[2], seqs[3], seqs[6], seqs[7])
	assert.Equal(t, []string{"2 behind retry", "3 behind behind", "5 expired parked", "6 behind behind", "9 failed parked", "10 failed parked", "11 behind behind"}, left(t, conn))
	assert.Len(t, result.Done, 4)
	assert.Equal(t, int64(2), result.Released)
	require.Len(t, result.Behind, 1)
	assert.Equal(t, seqs[2], result.Behind[0].Seq)

	whole := discard(t, conn, true, seqs[4], seqs[8], seqs[9])
	assert.Equal(t, []string{"2 behind retry", "3 behind behind"}, left(t, conn))
	assert.Len(t, whole.Done, 5)
	assert.Empty(t, discard(t, conn, true, seqs...).Behind)
	assert.Empty(t, left(t, conn))
}

// If a consumer keeps no order, messages of one key are parked beside each other: each is acted on
// alone.
func TestMessagesWithoutOrderStandAlone(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	seqs := park(t, conn, "a failed parked", "a failed retry", "a failed parked", "a failed parked")
	assert.Zero(t, discard(t, conn, false, seqs[0]).Released)
	assert.Equal(t, []string{"2 failed retry", "3 failed parked", "4 failed parked"}, left(t, conn))
	assert.Len(t, retry(t, conn, seqs[3]).Done, 1)
	assert.Len(t, discard(t, conn, false, seqs[2]).Done, 1)
	assert.Equal(t, []string{"2 failed retry", "4 failed retry"}, left(t, conn))
}

// Every retry and discard is recorded with who, why and what, in the same transaction.
func TestActionsAreWrittenDown(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	seqs := park(t, conn, "a failed parked", "a behind behind", "- permanent parked", "b too_large parked")
	exec(t, conn, `UPDATE effectonce.parked_messages SET key = '\x00ff' WHERE seq = $1`, seqs[3])
	retry(t, conn, seqs...)
	discard(t, conn, false, seqs[3])
	discard(t, conn, false, seqs[3])
	discard(t, conn, true, seqs[0])

	actions, err := parked.Actions(t.Context(), conn, schema, parked.ActionFilter{}, 100)
	require.NoError(t, err)
	var said []string
	for _, a := range actions {
		said = append(said, a.What+" "+a.Object()[35:])
		assert.Equal(t, ana.Who, *a.Stated)
		assert.Equal(t, conn.Config().User, a.Who)
		assert.Equal(t, ana.Why, a.Why)
		assert.NotEmpty(t, a.Role)
		assert.NotContains(t, string(a.Subject), "payload")
	}
	assert.Equal(t, []string{"parked.discard 2", "parked.discard 1", "parked.discard 4", "parked.retry 3", "parked.retry 1"}, said)
	var subject map[string]any
	require.NoError(t, json.Unmarshal(actions[4].Subject, &subject))
	assert.Equal(t, map[string]any{
		"seq": float64(seqs[0]), "consumer": "billing/orders", "message_id": "00000000-0000-0000-0000-000000000001", "topic": "orders",
		"partition": 0.0, "offset": 1.0, "key": "a", "reason": "failed", "error": "error 1", "attempts": 10.0, "state": "parked",
	}, subject)
	assert.Contains(t, string(actions[3].Subject), `"key": null`)
	assert.Contains(t, string(actions[2].Subject), `"key": "base64:AP8="`)

	// An action that cannot be recorded is not done.
	exec(t, conn, "ALTER TABLE effectonce.operator_actions ADD CHECK (stated <> 'ana@ops') NOT VALID")
	park(t, conn, "a failed parked")
	before := left(t, conn)
	_, err = parked.Retry(t.Context(), conn, schema, ana, []int64{seqs[3] + 1})
	require.Error(t, err)
	_, err = parked.Discard(t.Context(), conn, schema, ana, []int64{seqs[3] + 1}, false)
	require.Error(t, err)
	assert.Equal(t, before, left(t, conn))
}

// A consumer that is handling a message decides about it: an operator's action waits for it, and
// then finds what remains. That also holds for a role whose transactions would not see it by
// default.
func TestConsumerInTheMiddleWins(t *testing.T) {
	t.Parallel()
	for name, action := range map[string]func(context.Context, *pgx.Conn, []int64) (*parked.Result, error){
		"retry": func(ctx context.Context, c *pgx.Conn, seqs []int64) (*parked.Result, error) {
			return parked.Retry(ctx, c, schema, ana, seqs)
		},
		"discard": func(ctx context.Context, c *pgx.Conn, seqs []int64) (*parked.Result, error) {
			return parked.Discard(ctx, c, schema, ana, seqs, false)
		},
		"discard whole key": func(ctx context.Context, c *pgx.Conn, seqs []int64) (*parked.Result, error) {
			return parked.Discard(ctx, c, schema, ana, seqs, true)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			address := pgtest.Database(t)
			consumer, operator, look := connect(t, address), connect(t, address), connect(t, address)
			exec(t, operator, "SET default_transaction_isolation = 'repeatable read'")
			seqs := park(t, look, "a failed retry", "a behind behind", "a behind behind")
			exec(t, consumer, "BEGIN")
			exec(t, consumer, succeed)
			var result *parked.Result
			done := make(chan error)
			go func() {
				var err error
				result, err = action(t.Context(), operator, seqs[:1])
				done <- err
			}()
			pgtest.Blocked(t, look, consumer)
			exec(t, consumer, "COMMIT")
			require.NoError(t, <-done)
			if name == "discard whole key" {
				assert.Len(t, result.Done, 2)
				assert.Empty(t, left(t, look))
				return
			}
			assert.Empty(t, result.Done)
			assert.Equal(t, []string{"2 behind retry", "3 behind behind"}, left(t, look))
		})
	}
}

// A deadlock with a consumer's transaction costs another try, not the action.
func TestDeadlockIsTriedAgain(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	consumer, operator, look := connect(t, address), connect(t, address), connect(t, address)
	exec(t, consumer, "SET deadlock_timeout = '1h'")
	exec(t, operator, "SET deadlock_timeout = '10s'")
	seqs := park(t, look, "a failed parked", "b failed parked")
	exec(t, consumer, "BEGIN")
	exec(t, consumer, "SELECT FROM effectonce.parked_messages WHERE seq = $1 FOR UPDATE", seqs[1])
	var result *parked.Result
	done := make(chan error)
	go func() {
		var err error
		result, err = parked.Discard(t.Context(), operator, schema, ana, seqs, false)
		done <- err
	}()
	pgtest.Blocked(t, look, consumer)
	exec(t, consumer, "SELECT FROM effectonce.parked_messages WHERE seq = $1 FOR UPDATE", seqs[0])
	exec(t, consumer, "COMMIT")
	require.NoError(t, <-done)
	assert.Len(t, result.Done, 2)
	assert.Empty(t, left(t, look))
}
