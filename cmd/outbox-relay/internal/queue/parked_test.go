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

// Row C15 of guarantees.md: only the first message of a key is handed back, nothing twice, and
// nothing that has no payload; the rest is left as it was.
func TestParkedRetryHandsHeadsBack(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	seqs := parked.insert(t, conn, "a failed parked", "a behind behind", "b failed retry", "c too_large parked", "- permanent parked", "d behind behind")
	exec(t, conn, "UPDATE effectonce.parked_messages SET retry_at = 'epoch', released_at = 'epoch'")
	result := parked.retry(t, conn, append(seqs, 4711)...)
	assert.Equal(t, []string{"1 failed retry", "2 behind behind", "3 failed retry", "4 too_large parked", "5 permanent retry", "6 behind retry"}, parked.left(t, conn),
		"row 6 has lost its head, and is one")
	assert.Len(t, result.Done, 3)
	assert.Len(t, result.Retrying, 1)
	require.Len(t, result.NoPayload, 1)
	assert.Equal(t, byte(4), result.NoPayload[0][15])
	require.Len(t, result.Behind, 1)
	assert.Equal(t, byte(2), result.Behind[0][15])
	var due bool
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT bool_and(retry_at > clock_timestamp() - interval '1 minute' AND released_at IS NULL)
		FROM effectonce.parked_messages WHERE seq = ANY ($1)`, []int64{seqs[0], seqs[4], seqs[5]}).Scan(&due))
	assert.True(t, due, "handed back means due now, with a new time of release")

	again := parked.retry(t, conn, seqs[0])
	assert.Empty(t, again.Done)
	assert.Len(t, again.Retrying, 1)
}

// Discarding the first message of a key lets the rest continue in order, and nothing else: messages
// that only waited are handed back, messages with a reason of their own wait for an operator, other
// keys are unchanged.
func TestDiscardReleasesTheNext(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	seqs := parked.insert(t, conn, "a failed parked", "a behind behind", "a behind behind", "b failed parked", "b expired behind", "b behind behind",
		"c failed retry", "- failed parked", "- failed parked", "d failed parked", "d behind behind")
	result := parked.discard(t, conn, false, seqs[0], seqs[2], seqs[3], seqs[6], seqs[7])
	assert.Equal(t, []string{"2 behind retry", "3 behind behind", "5 expired parked", "6 behind behind", "9 failed parked", "10 failed parked", "11 behind behind"}, parked.left(t, conn))
	assert.Len(t, result.Done, 4)
	assert.Equal(t, int64(2), result.Released)
	require.Len(t, result.Behind, 1)
	assert.Equal(t, byte(3), result.Behind[0][15])

	whole := parked.discard(t, conn, true, seqs[4], seqs[8], seqs[9])
	assert.Equal(t, []string{"2 behind retry", "3 behind behind"}, parked.left(t, conn))
	assert.Len(t, whole.Done, 5)
	assert.Empty(t, parked.discard(t, conn, true, seqs...).Behind)
	assert.Empty(t, parked.left(t, conn))
}

// If a consumer keeps no order, messages of one key are parked beside each other: each is acted on
// alone.
func TestMessagesWithoutOrderStandAlone(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	seqs := parked.insert(t, conn, "a failed parked", "a failed retry", "a failed parked", "a failed parked")
	assert.Zero(t, parked.discard(t, conn, false, seqs[0]).Released)
	assert.Equal(t, []string{"2 failed retry", "3 failed parked", "4 failed parked"}, parked.left(t, conn))
	assert.Len(t, parked.retry(t, conn, seqs[3]).Done, 1)
	assert.Len(t, parked.discard(t, conn, false, seqs[2]).Done, 1)
	assert.Equal(t, []string{"2 failed retry", "4 failed retry"}, parked.left(t, conn))
}

// A consumer that is handling a message decides about it: an operator's action waits for it, and
// then finds what remains. That also holds for a role whose transactions would not see it by
// default.
func TestConsumerInTheMiddleWins(t *testing.T) {
	t.Parallel()
	for name, action := range map[string]func(context.Context, *pgx.Conn, []int64) (*queue.Result[int64], error){
		"retry": func(ctx context.Context, c *pgx.Conn, seqs []int64) (*queue.Result[int64], error) {
			return parked.Retry(ctx, c, ana, seqs)
		},
		"discard whole key": func(ctx context.Context, c *pgx.Conn, seqs []int64) (*queue.Result[int64], error) {
			return parked.Discard(ctx, c, ana, seqs, true)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			result, left := inTheMiddle(t, parked, succeed, action, "a failed retry", "a behind behind", "a behind behind")
			if name == "discard whole key" {
				assert.Len(t, result.Done, 2)
				assert.Empty(t, left)
				return
			}
			assert.Empty(t, result.Done)
			assert.Equal(t, []string{"2 behind retry", "3 behind behind"}, left)
		})
	}
}

// Each filter selects only what it names, and only heads unless the messages behind them are
// requested.
func TestParkedFiltersNarrow(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	seqs := parked.insert(t, conn, "a failed parked", "a behind behind", "b permanent parked", "- failed retry", "c behind behind")
	exec(t, conn, "INSERT INTO effectonce.consumers (name, consumer_group, topics) VALUES ('audit/payments', 'audit', '{payments}')")
	exec(t, conn, `UPDATE effectonce.parked_messages SET topic = 'payments', consumer = (SELECT id FROM effectonce.consumers WHERE consumer_group = 'audit')
		WHERE seq = $1`, seqs[2])
	exec(t, conn, "UPDATE effectonce.parked_messages SET parked_at = clock_timestamp() - interval '2 hours' WHERE seq = $1", seqs[3])
	for name, c := range map[string]struct {
		filter queue.ParkedFilter
		want   []int64
	}{
		"none":           {queue.ParkedFilter{}, []int64{1, 3, 4, 5}},
		"behind too":     {queue.ParkedFilter{Behind: true}, []int64{1, 2, 3, 4, 5}},
		"other key":      {queue.ParkedFilter{Key: human.Key{}}, nil},
		"seqs":           {queue.ParkedFilter{Seqs: seqs[:2]}, []int64{1}},
		"no seqs at all": {queue.ParkedFilter{Seqs: []int64{}}, nil},
		"two at once":    {queue.ParkedFilter{Reason: to("failed"), OlderThan: to(time.Hour)}, []int64{4}},
	} {
		assert.Equal(t, c.want, parked.numbers(t, conn, c.filter), name)
	}

	found, err := parked.List(t.Context(), conn, queue.ParkedFilter{Behind: true}, 100)
	require.NoError(t, err)
	behind, first := found[3], found[4]
	assert.Equal(t, int64(1), first.Behind)
	assert.Nil(t, first.Head)
	assert.Equal(t, first.ID, *behind.Head)
	assert.Equal(t, "orders/0/1", first.At())
	assert.Nil(t, found[0].Head, "it has lost its head")
	assert.NotNil(t, found[1].RetryInSeconds)
	assert.Nil(t, first.RetryInSeconds)
	totals, err := parked.Totals(t.Context(), conn, queue.ParkedFilter{Topic: to("orders")})
	require.NoError(t, err)
	assert.Equal(t, []queue.Total{{"billing/orders", "behind", 2, 0, 0}, {"billing/orders", "failed", 2, 1, 1}}, totals)
}

// A message is found by what a person knows of it: the ID in the log, the ID that the producer
// gave, or the record's place in Kafka.
func TestFindTakesWhatAPersonHas(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	seqs := parked.insert(t, conn, "a failed parked", "b failed parked", "c failed parked", "d failed parked")
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
		found, err := queue.FindParked(t.Context(), conn, schema, text)
		require.NoError(t, err, text)
		assert.Equal(t, []int64{want}, found, text)
	}
	for _, text := range []string{"order-4712", "orders/1/1", "orders/0/x", "payments/0/1", "'; --"} {
		_, err := queue.FindParked(t.Context(), conn, schema, text)
		require.ErrorIs(t, err, queue.ErrNotFound, text)
	}
}

// Everything about a message is shown; of long columns only a part.
func TestParkedShowHasEverything(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	seqs := parked.insert(t, conn, slices.Insert(slices.Repeat([]string{"a behind behind"}, 21), 0, "a failed parked")...)
	for range 21 {
		parked.retry(t, conn, seqs[0])
		exec(t, conn, "UPDATE effectonce.parked_messages SET state = 'parked' WHERE state = 'retry'")
	}
	d, err := queue.ShowParked(t.Context(), conn, schema, seqs[0], 3)
	require.NoError(t, err)
	assert.Equal(t, "pay", string(d.Payload))
	assert.Equal(t, int64(9), *d.PayloadBytes)
	assert.Equal(t, int64(21), d.Behind)
	require.Len(t, d.Next, 20)
	assert.Equal(t, int64(2), d.Next[0].Offset)
	assert.Len(t, d.Actions, 20)
	_, err = queue.ShowParked(t.Context(), conn, schema, 4711, 3)
	require.ErrorIs(t, err, queue.ErrNotFound)
}
