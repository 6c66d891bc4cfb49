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
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
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
	each(t, map[string]consumer.Handler{
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
	}, func(t *testing.T, h *harness, _ string, handler consumer.Handler) {
		t.Helper()
		h.produce("1", "2", "3", "4", "5")
		stop := h.run(handler, func(c *consumer.Config) { c.BatchMax = 5 })
		h.waitEffects(5)
		h.untilHandled(5, stop)
		require.Equal(t, 5, h.number(`SELECT count(*) FROM effectonce.outbox WHERE topic = 'child'`))
		// A handler sees the rows of earlier transactions, and none of its own.
		h.exec(`ALTER TABLE effects ADD tx bigint, ADD saw bigint; UPDATE effects SET tx = split_part(value, ' ', 1)::bigint, saw = split_part(value, ' ', 2)::bigint`)
		require.Less(t, h.number(`SELECT count(DISTINCT tx) FROM effects`), 5, "the test's own premise: messages share a transaction")
		require.Zero(t, h.number(`SELECT count(*) FROM effects e WHERE saw <> (SELECT count(*) FROM effects earlier WHERE earlier.tx < e.tx)`))
	})
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
		h.waitNumber(2, `SELECT coalesce(max(next_offset), 0) FROM effectonce.consumer_positions WHERE consumer_group = $1`, group)
		require.NoError(t, stop())
	}
	require.Equal(t, 4, h.number(`SELECT count(DISTINCT id) FROM effectonce.outbox`))
	require.Equal(t, 2, h.number(`SELECT count(DISTINCT id) FROM effectonce.outbox_scheduled`))
}

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
		h.produceRecords(&kgo.Record{Value: []byte("a"), Timestamp: time.Now().Add(-72 * time.Hour), Headers: headers("message-id=" + id.String())})
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
		return h.texts(`SELECT id::text FROM effectonce.outbox_scheduled`)
	}
	run := func() {
		h.untilHandled(2, h.run(handler, nil))
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
	id := uuid.UUID(pgtest.Value[[16]byte](t, h.pool, `SELECT message_id FROM effects LIMIT 1`))
	var want []string
	for _, group := range groups {
		want = append(want, dedup.CallKey(group+"/"+h.topic, id, "charge").String())
	}
	require.ElementsMatch(t, want, h.values())
}

// Property: a message whose handler publishes what the outbox refuses, by a policy of a topic or a
// trigger, is parked after its attempts; the others have their effects.
func TestRefusedTopicCostsOnlyItsMessage(t *testing.T) {
	t.Parallel()
	eachOf(t, []string{"42501", "P0001", "23514", "XX000"}, func(t *testing.T, h *harness, state string) {
		t.Helper()
		h.exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not this topic' USING ERRCODE = '` + state + `'; END $$;
			CREATE TRIGGER refuse BEFORE INSERT ON effectonce.outbox FOR EACH ROW WHEN (NEW.topic = 'secret') EXECUTE FUNCTION refuse()`)
		h.produce("a", "secret", "b")
		h.untilHandled(3, h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			if err := outbox.Publish(ctx, tx, outbox.Message{Topic: string(msg.Value)}); err != nil {
				return err
			}
			return effect(ctx, tx, msg)
		}), func(c *consumer.Config) { c.AttemptsMax, c.ParkShareMax = 2, 1 }))
		require.Equal(t, []string{"a", "b"}, h.values())
		require.Equal(t, []string{"secret failed parked"}, h.parked())
		require.Equal(t, 2, h.number(`SELECT count(*) FROM effectonce.outbox`))
	})
}

// Property: the child of a record whose time is none is fresh at the next consumer.
func TestChildOfARecordWithoutATimeIsFresh(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	c := h.make(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		return outbox.Publish(ctx, tx, outbox.Message{Topic: "next", Payload: msg.Value})
	}), nil)
	_, err := c.Deliver(t.Context(), &kgo.Record{Topic: h.topic, Timestamp: time.UnixMilli(0), Value: []byte("v")})
	require.NoError(t, err)
	id := pgtest.Value[string](t, h.pool, `SELECT id::text FROM effectonce.outbox`)
	next := h.make(consumer.Each(effect), func(c *consumer.Config) { c.Group, c.Topics = h.topic+"-next", []string{"next"} })
	_, err = next.Deliver(t.Context())
	require.NoError(t, err)
	h.exec(`UPDATE effectonce.consumers SET forgotten_to = now() - interval '7 days'`) // as maintenance does
	d, err := next.Deliver(t.Context(), &kgo.Record{Topic: "next", Timestamp: time.Now(), Value: []byte("v"), Headers: headers("message-id=" + id)})
	require.NoError(t, err)
	require.Equal(t, consumer.Delivered{Fresh: 1}, d)
}
