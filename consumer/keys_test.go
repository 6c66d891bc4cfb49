package consumer_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/dedup"
)

// Property: the keys of foreign calls are derived from the name of the consumer, in every order and
// after parking: two consumers of a message make two calls, and each of them the same one in every
// attempt.
func TestCallKeysAreOfTheConsumer(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	const key = "a"
	h.produceKeyed(key + ":1")
	var released atomic.Bool
	called := func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		_, err := tx.Exec(ctx, `INSERT INTO effects (message_id, value) VALUES ($1, $2)`, [16]byte(msg.ID), msg.CallKey("charge").String())
		return err
	}
	parked := func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if !released.Load() {
			return consumer.Permanent(errBad)
		}
		return called(ctx, tx, msg)
	}
	var groups []string
	var stops []func() error
	for order, name := range map[consumer.Order]string{
		consumer.OrderByPartition: "partition", consumer.OrderByKey: "key", consumer.OrderUnordered: "unordered",
	} {
		for kind, handler := range map[string]func(context.Context, pgx.Tx, *consumer.Message) error{"called": called, "parked": parked} {
			group := h.topic + "." + name + "." + kind
			groups = append(groups, group)
			stops = append(stops, h.run(consumer.Each(handler), func(c *consumer.Config) { c.Group, c.Order = group, order }))
		}
	}
	h.waitParked("permanent", "permanent", "permanent")
	released.Store(true)
	h.retry()
	h.waitEffects(len(groups))
	for _, stop := range stops {
		require.NoError(t, stop())
	}
	var id uuid.UUID
	require.NoError(t, h.pool.QueryRow(t.Context(), `SELECT message_id FROM effects LIMIT 1`).Scan((*[16]byte)(&id)))
	var want []string
	for _, group := range groups {
		want = append(want, dedup.CallKey(group+"/"+h.topic, id, "charge").String())
	}
	require.ElementsMatch(t, want, h.values())
}
