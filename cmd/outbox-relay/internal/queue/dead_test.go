package queue_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/queue"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Row O10 of guarantees.md: only the first row of a key is handed back, and nothing twice; the rest
// is left as it was.
func TestDeadRetryHandsHeadsBack(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	places := dead.insert(t, conn, "a too_large held", "a behind behind", "b refused retry", "- unknown_topic held", "c behind behind", "d refused held")
	exec(t, conn, "UPDATE effectonce.outbox_dead SET relay = 'other' WHERE seq = 6")
	result := dead.retry(t, conn, append(places, at(4711))...)
	assert.Equal(t, []string{"1 too_large retry", "2 behind behind", "3 refused retry", "4 unknown_topic retry", "5 behind retry", "6 refused held"}, dead.left(t, conn),
		"row 5 has lost its head, and is one; row 6 is another relay's")
	assert.Len(t, result.Done, 3)
	assert.Len(t, result.Retrying, 1)
	require.Len(t, result.Behind, 1)
	assert.Equal(t, byte(2), result.Behind[0][15])
	again := dead.retry(t, conn, places[0])
	assert.Empty(t, again.Done)
	assert.Len(t, again.Retrying, 1)
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
	result := dead.discard(t, conn, false, places[0], places[2], places[5], places[6], places[7], places[10])
	assert.Equal(t, []string{"2 behind retry", "3 behind behind", "4 refused held", "5 behind behind", "6 refused retry", "7 behind behind", "9 refused held", "10 refused held", "12 refused held"}, dead.left(t, conn))
	assert.Len(t, result.Done, 3)
	assert.Equal(t, int64(1), result.Released)
	assert.Len(t, result.Behind, 2)
	require.Len(t, result.Retrying, 1)
	assert.Equal(t, byte(6), result.Retrying[0].ID()[15])

	whole := dead.discard(t, conn, true, places[1], places[3], places[5], places[8])
	assert.Equal(t, []string{"2 behind retry", "3 behind behind", "6 refused retry", "7 behind behind", "10 refused held", "12 refused held"}, dead.left(t, conn),
		"of a key that was handed back nothing is given up")
	assert.Len(t, whole.Done, 3)
	assert.Zero(t, whole.Released)
}

// What the relay decides first counts: an action that waited for the relay checks again. So a row
// that was released in between, because its topic exists now, is not discarded while the relay
// publishes it. That also holds for a role whose transactions would not see it by default.
func TestReleasedInTheMiddleIsNotDiscarded(t *testing.T) {
	t.Parallel()
	for name, wholeKeys := range map[string]bool{"row": false, "whole key": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			result, left := inTheMiddle(t, dead, "UPDATE effectonce.outbox_dead SET state = 'retry' WHERE reason = 'unknown_topic' AND state = 'held'",
				func(ctx context.Context, c *pgx.Conn, places []queue.DeadPlace) (*queue.Result[queue.DeadPlace], error) {
					return dead.Discard(ctx, c, ana, places, wholeKeys)
				}, "a unknown_topic held", "a behind behind")
			assert.Empty(t, result.Done)
			assert.Len(t, result.Retrying, 1)
			assert.Equal(t, []string{"1 unknown_topic retry", "2 behind behind"}, left)
		})
	}
}

// Each filter selects only what it names, and only heads unless the rows behind them are requested.
func TestDeadFiltersNarrow(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	dead.insert(t, conn, "a too_large held", "a behind behind", "b refused held", "- too_large retry", "c behind behind")
	exec(t, conn, "UPDATE effectonce.outbox_dead SET topic = 'payments', relay = 'other' WHERE seq = 3")
	exec(t, conn, "UPDATE effectonce.outbox_dead SET died_at = clock_timestamp() - interval '2 hours' WHERE seq = 4")
	for name, c := range map[string]struct {
		filter queue.DeadFilter
		want   []int64
	}{
		"none":           {queue.DeadFilter{}, []int64{1, 3, 4, 5}},
		"behind too":     {queue.DeadFilter{Behind: true}, []int64{1, 2, 3, 4, 5}},
		"other key":      {queue.DeadFilter{Key: human.Key{}}, nil},
		"seqs":           {queue.DeadFilter{Seqs: []int64{1, 2}}, []int64{1}},
		"no seqs at all": {queue.DeadFilter{Seqs: []int64{}}, nil},
		"two at once":    {queue.DeadFilter{Reason: to("too_large"), OlderThan: to(time.Hour)}, []int64{4}},
	} {
		assert.Equal(t, c.want, dead.numbers(t, conn, c.filter), name)
	}

	found, err := dead.List(t.Context(), conn, queue.DeadFilter{Behind: true}, 100)
	require.NoError(t, err)
	first, behind := found[4], found[3]
	assert.Equal(t, int64(1), first.Behind)
	assert.Nil(t, first.Head)
	assert.Equal(t, first.ID, *behind.Head)
	assert.Nil(t, found[0].Head, "it has lost its head")
	totals, err := dead.Totals(t.Context(), conn, queue.DeadFilter{Topic: to("orders")})
	require.NoError(t, err)
	assert.Equal(t, []queue.Total{{"default", "behind", 2, 0, 0}, {"default", "too_large", 2, 1, 1}}, totals)
}

// Everything about a row is shown; of long columns only a part.
func TestDeadShowHasEverything(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	places := dead.insert(t, conn, slices.Insert(slices.Repeat([]string{"a behind behind"}, 21), 0, "a refused held")...)
	dead.retry(t, conn, places[0])
	d, err := queue.ShowDead(t.Context(), conn, schema, places[0], 3)
	require.NoError(t, err)
	assert.Equal(t, "pay", string(d.Payload))
	assert.JSONEq(t, `{"type": "order"}`, string(d.Headers))
	assert.Equal(t, int64(21), d.Behind)
	require.Len(t, d.Next, 20)
	assert.Equal(t, int64(2), d.Next[0].Seq)
	assert.Len(t, d.Actions, 1)
	_, err = queue.ShowDead(t.Context(), conn, schema, queue.DeadPlace{Relay: "other", Seq: 1}, 3)
	require.ErrorIs(t, err, queue.ErrNotFound)
}
