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

// Property: a message that was published to two topics has, under its one ID, an effect for each
// topic where the claims are of each topic, and one in all where a Name spans both; two consumers
// do not take each other's claims.
func TestFanOutIsClaimedForEachTopicUnlessANameSpansThem(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		spanning string
		readers  func(a, b string) [][]string
		effects  int
	}{
		"one consumer of both":             {"", func(a, b string) [][]string { return [][]string{{a, b}} }, 2},
		"one consumer of both with a name": {"both", func(a, b string) [][]string { return [][]string{{a, b}} }, 1},
		"two consumers":                    {"", func(a, b string) [][]string { return [][]string{{a}, {b}} }, 2},
		"two consumers of both":            {"", func(a, b string) [][]string { return [][]string{{a, b}, {a, b}} }, 4},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			second := kafkatest.Topic(t, 1)
			require.NoError(t, pgx.BeginFunc(t.Context(), h.pool, func(tx pgx.Tx) error {
				return outbox.Publish(t.Context(), tx, outbox.Message{Topic: h.topic, AlsoTo: []string{second}, Payload: []byte("x")})
			}))
			h.drainOutbox()
			handled := 0
			for i, topics := range c.readers(h.topic, second) {
				stop := h.run(consumer.Each(effect), func(cfg *consumer.Config) {
					cfg.Group, cfg.Topics, cfg.Name = h.topic+string(rune('a'+i)), topics, c.spanning
				})
				handled += len(topics)
				h.wait("every topic is read", func() bool {
					return h.number(`SELECT count(*) FROM effectonce.consumer_positions WHERE next_offset = 1`) == handled
				})
				require.NoError(t, stop())
			}
			require.Equal(t, c.effects, h.number(`SELECT count(*) FROM effects`))
			require.Equal(t, 1, h.number(`SELECT count(DISTINCT message_id) FROM effects`))
		})
	}
}
