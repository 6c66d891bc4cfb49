package held_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/held"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/internal/pgtest"
)

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
			assert.Equal(t, c.want, k.numbers(t, conn, c.filter), name)
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
		assert.Equal(t, int64(21), d.Behind)
		require.Len(t, d.Next, 20)
		assert.Equal(t, refs[1], d.Next[0].Ref)
		assert.Len(t, d.Actions, 20)
		_, err = k.Show(t.Context(), conn, schema, held.Ref{Relay: "other", Seq: 1}, 3)
		require.ErrorIs(t, err, held.ErrNotFound)
	})
}
