package consumer_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/outbox"
)

// Property: what handlers publish is inserted as the last statements of the transaction, behind the
// effects of the whole batch. So rows of the outbox keep the relay waiting for as short as can be.
func TestHandlersPublishLast(t *testing.T) {
	t.Parallel()
	// The transaction, and how many rows of the outbox it sees
	const seenSQL = `SELECT pg_current_xact_id()::text || ' ' || count(*) FROM effectonce.outbox WHERE topic = 'child'`
	const seen = `INSERT INTO effects (message_id, value) SELECT $1, (` + seenSQL + `)`
	child := outbox.Message{Topic: "child", Key: []byte("k"), Payload: []byte("child")}
	inserted := func(ctx context.Context, tx pgx.Tx, msgs ...*consumer.Message) error {
		for _, msg := range msgs {
			child := child
			child.ID = msg.PublishID("child") // a handler of whole batches has to derive it
			if err := outbox.Publish(ctx, tx, child); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, seen, [16]byte(msg.ID)); err != nil {
				return err
			}
		}
		return nil
	}
	for name, handler := range map[string]consumer.Handler{
		"each": consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			return inserted(ctx, tx, msg)
		}),
		"batch": consumer.Batch(func(ctx context.Context, tx pgx.Tx, msgs []*consumer.Message) error {
			return inserted(ctx, tx, msgs...)
		}),
		"queued": consumer.Queued(func(ctx context.Context, q *consumer.Queue, msg *consumer.Message) error {
			if err := q.Publish(ctx, child); err != nil {
				return err
			}
			q.Queue(seen, [16]byte(msg.ID))
			return nil
		}),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			h.produceAll("1", "2", "3", "4", "5")
			stop := h.run(handler, func(c *consumer.Config) { c.BatchMax = 5 })
			h.waitEffects(5)
			h.wait("position", func() bool { return h.position() == 5 })
			require.NoError(t, stop())
			require.Equal(t, 5, h.number(`SELECT count(*) FROM effectonce.outbox WHERE topic = 'child'`))
			// A handler sees the rows of earlier transactions, and none of its own.
			h.exec(`ALTER TABLE effects ADD tx bigint, ADD saw bigint; UPDATE effects SET tx = split_part(value, ' ', 1)::bigint, saw = split_part(value, ' ', 2)::bigint`)
			require.Less(t, h.number(`SELECT count(DISTINCT tx) FROM effects`), 5, "the test's own premise: messages share a transaction")
			require.Zero(t, h.number(`SELECT count(*) FROM effects e WHERE saw <> (SELECT count(*) FROM effects earlier WHERE earlier.tx < e.tx)`))
		})
	}
}

// Property: a handler of whole batches that publishes a message without an ID is parked with the
// remedy, which is stated once.
func TestBatchWithoutPublishIDIsParked(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produce("1")
	stop := h.run(consumer.Batch(func(ctx context.Context, tx pgx.Tx, _ []*consumer.Message) error {
		return outbox.Publish(ctx, tx, outbox.Message{Topic: "child", Payload: []byte("child")})
	}), nil)
	h.waitParked("permanent")
	require.NoError(t, stop())
	require.Equal(t, 1, h.number(`SELECT (length(error) - length(replace(error, 'msg.PublishID', ''))) / length('msg.PublishID') FROM effectonce.parked_messages`))
	require.Zero(t, h.number(`SELECT count(*) FROM effectonce.outbox`))
}

// Property: two consumers of one message that publish to one topic publish two messages, now, for
// later and as dead letters: the next consumer drops neither.
func TestConsumersOfAMessagePublishUnderIDsOfTheirOwn(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceAs("1", "good")
	h.produceAs("2", "bad")
	handler := consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if string(msg.Value) == "bad" {
			return consumer.Permanent(errBad)
		}
		return outbox.Publish(ctx, tx, outbox.Message{Topic: "next"}, outbox.Message{Topic: "next", DeliverAt: time.Now().Add(time.Hour)})
	})
	for _, group := range []string{h.topic + ".a", h.topic + ".b"} {
		stop := h.run(handler, func(c *consumer.Config) {
			c.Group, c.OnFailure, c.DeadLetterTopic = group, consumer.OnFailureDeadLetter, "dead"
		})
		h.wait("position", func() bool {
			return h.number(`SELECT coalesce(max(next_offset), 0) FROM effectonce.consumer_positions WHERE consumer_group = $1`, group) == 2
		})
		require.NoError(t, stop())
	}
	require.Equal(t, 4, h.number(`SELECT count(DISTINCT id) FROM effectonce.outbox`))
	require.Equal(t, 2, h.number(`SELECT count(DISTINCT id) FROM effectonce.outbox_scheduled`))
}
