package consumer_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

func (h *harness) drainOutbox() {
	h.t.Helper()
	r, err := relay.New(h.pool, []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(h.t)...)}, relay.Config{})
	require.NoError(h.t, err)
	_, err = r.Drain(h.t.Context())
	require.NoError(h.t, err)
}

// Property: a message that a handler schedules is committed with the claim: once, whatever fails
// before and is redelivered after. Its ID is derived, and the same at a re-execution that asks for
// another time. A consumer whose window is far shorter than the wait still takes it for fresh.
func TestScheduledInHandlerCommitsWithTheClaim(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	next := kafkatest.Topic(t, 1)
	id := uuid.Must(uuid.NewV7())
	record := func() {
		// Of three days ago: so much later its child is due.
		h.produceRecord(&kgo.Record{Value: []byte("a"), Timestamp: time.Now().Add(-72 * time.Hour), Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte(id.String())}}})
	}
	record()
	record()
	var failures, runs atomic.Int64
	handler := consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if err := outbox.Publish(ctx, tx, outbox.Message{Topic: next, Payload: []byte("later"), DeliverAt: time.Now().Add(-time.Duration(runs.Add(1)) * time.Hour)}); err != nil {
			return err
		}
		if failures.Add(1) == 1 {
			return errors.New("not yet")
		}
		return effect(ctx, tx, msg)
	})
	scheduled := func() []string {
		rows, err := h.pool.Query(t.Context(), `SELECT id::text FROM effectonce.outbox_scheduled`)
		require.NoError(t, err)
		ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return ids
	}
	run := func() {
		stop := h.run(handler, nil)
		h.wait("both records are handled", func() bool { return h.position() == 2 })
		require.NoError(t, stop())
		h.waitEffects(1)
	}
	run()
	first := scheduled()
	require.Len(t, first, 1)
	// A failover loses everything; the re-execution schedules the same ID.
	h.exec(`DELETE FROM effectonce.processed_messages; DELETE FROM effectonce.outbox_scheduled; DELETE FROM effects; UPDATE effectonce.consumer_positions SET next_offset = 0`)
	run()
	require.Equal(t, first, scheduled())
	_, timed := dedup.Time(uuid.MustParse(first[0]))
	require.False(t, timed)

	h.drainOutbox()
	require.Empty(t, scheduled())
	h.exec(`DELETE FROM effects`)
	stop := h.run(consumer.Each(effect), func(c *consumer.Config) {
		c.Group, c.Topics, c.Window = next, []string{next}, time.Hour
	})
	h.wait("the message is handled", func() bool {
		return h.number(`SELECT count(*) FROM effects`)+h.number(`SELECT count(*) FROM effectonce.parked_messages`) > 0
	})
	require.NoError(t, stop())
	require.Empty(t, h.parked())
	require.Equal(t, []string{"later"}, h.values())
}
