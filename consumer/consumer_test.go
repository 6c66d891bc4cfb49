package consumer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/outbox"
)

// Property: a message that a producer sent twice, or that is twice in one batch, has one effect;
// the first occurrence counts. Rows C22, C26 of guarantees.md.
func TestDuplicatesOfTheProducerHaveOneEffect(t *testing.T) {
	t.Parallel()
	each(t, shapes(func(*consumer.Message) error { return nil }), func(t *testing.T, h *harness, _ string, handler consumer.Handler) {
		t.Helper()
		h.produceAs("order-1", "first")
		h.produceAs("order-1", "again")
		h.produceAs("order-2", "other")
		stop := h.run(handler, nil)
		h.waitEffects(2)
		h.produceAs("order-1", "much later")
		h.untilHandled(4, stop)
		require.Equal(t, []string{"first", "other"}, h.values())
	})
}

// Property: the offset that Kafka knows is never ahead of the position that is committed with the
// effects, and a clean stop leaves nothing to be redelivered. Rows C1, C42 of guarantees.md.
func TestKafkaOffsetFollowsTheCommit(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produce(numbered(30)...)
	var fail atomic.Bool
	fail.Store(true)
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if fail.Load() && string(msg.Value) == "20" {
			return errors.New("not yet")
		}
		return effect(ctx, tx, msg)
	}), block)
	h.waitEffects(20)
	h.wait("complaint", func() bool { return strings.Contains(h.log.String(), "blocks its partition") })
	require.NoError(t, stop())
	require.Equal(t, 20, h.position())
	require.Equal(t, 20, h.committed())
	require.Contains(t, h.log.String(), "offset=20")

	fail.Store(false)
	var duplicates atomic.Int64
	h.untilEffects(30, h.run(consumer.Each(effect), func(c *consumer.Config) {
		c.Hooks.Processed = func(p consumer.Processed) { duplicates.Add(int64(p.Duplicates)) }
	}))
	require.Zero(t, duplicates.Load(), "redelivered after a clean stop")
	require.Equal(t, 30, h.committed())
}

// committed is the offset of partition 0 that Kafka knows; -1: none.
func (h *harness) committed() int {
	h.t.Helper()
	offsets, err := kadm.NewClient(kafkatest.ClientAt(h.t, h.brokers)).FetchOffsets(h.t.Context(), h.topic)
	require.NoError(h.t, err)
	at, ok := offsets.Lookup(h.topic, 0)
	if !ok {
		return -1
	}
	return int(at.At)
}

// Property: an error that appears only at COMMIT (a deferred constraint) fails its message alone.
// Row C18 of guarantees.md.
func TestErrorAtCommitFindsItsMessage(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.exec(`CREATE TABLE parent (id text PRIMARY KEY)`)
	h.exec(`CREATE TABLE child (id text REFERENCES parent DEFERRABLE INITIALLY DEFERRED)`)
	h.produce("a", "b", "orphan", "c")
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if string(msg.Value) == "orphan" {
			if _, err := tx.Exec(ctx, `INSERT INTO child VALUES ('orphan')`); err != nil {
				return err
			}
		}
		return effect(ctx, tx, msg)
	}), func(cfg *consumer.Config) { cfg.OnFailure = consumer.OnFailureBlock })
	h.wait("the orphan blocks", func() bool { return strings.Contains(h.log.String(), "offset=2") && h.position() == 2 })
	require.Equal(t, []string{"a", "b"}, h.values())
	h.exec(`INSERT INTO parent VALUES ('orphan')`)
	h.untilEffects(4, stop)
}

// Property: what handlers publish appears with their effects, after every other statement, under
// IDs that a re-execution derives again.
func TestPublishedInHandlerIsDerivedAndLast(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produce("a", "b")
	handler := consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if err := outbox.Publish(ctx, tx, outbox.Message{Topic: "next", Payload: msg.Value}, outbox.Message{Topic: "next", Payload: []byte("2")}); err != nil {
			return err
		}
		return effect(ctx, tx, msg)
	})
	h.untilEffects(2, h.run(handler, nil))
	published := func() []string {
		return h.texts(`SELECT id || ' ' || convert_from(payload, 'UTF8') FROM effectonce.outbox ORDER BY seq`)
	}
	first := published()
	require.Len(t, first, 4)
	// A failover loses everything; the re-execution publishes the same IDs again.
	h.exec(`DELETE FROM effectonce.processed_messages`)
	h.exec(`DELETE FROM effectonce.outbox`)
	h.exec(`DELETE FROM effects`)
	h.exec(`UPDATE effectonce.consumer_positions SET next_offset = 0`)
	h.untilEffects(2, h.run(handler, nil))
	require.Equal(t, first, published())
	require.NotContains(t, strings.Join(first, " "), h.texts(`SELECT message_id::text FROM effects`)[0])
}

// Property: IDs that no database takes as text (a megabyte, NUL, broken UTF-8), missing and empty
// ones disturb no other message: each such message has its effect once, without an ID by its
// coordinates. Rows C24, C25 of guarantees.md.
func TestOddIDs(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	odd := [][]byte{bytes.Repeat([]byte("x"), 900_000), {0, 1, 2}, {0xff, 0xfe}, []byte("'; DROP TABLE effects; --"), nil, {}, {}}
	for i, id := range odd {
		record := &kgo.Record{Value: []byte{byte('a' + i)}, Headers: []kgo.RecordHeader{{Key: "odd", Value: []byte{0xff}}}}
		if i != 4 {
			record.Headers = append(record.Headers, kgo.RecordHeader{Key: "message-id", Value: id})
		}
		h.produceRecords(record)
	}
	var without atomic.Int64
	h.untilEffects(len(odd), h.run(consumer.Each(effect), func(c *consumer.Config) {
		c.Hooks.Processed = func(p consumer.Processed) { without.Add(int64(p.WithoutID)) }
	}))
	require.EqualValues(t, 3, without.Load())
	require.Equal(t, 1, strings.Count(h.log.String(), "without an ID"), "said once")
}

// Property: what an aborted Kafka transaction wrote has no effect. Row C38 of guarantees.md.
func TestAbortedRecordsAreNotSeen(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	client := kafkatest.Client(t, kgo.TransactionalID(h.topic))
	for i, commit := range []kgo.TransactionEndTry{kgo.TryAbort, kgo.TryCommit} {
		require.NoError(t, client.BeginTransaction())
		require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: h.topic, Value: []byte{byte('0' + i)}}).FirstErr())
		require.NoError(t, client.EndTransaction(t.Context(), commit))
	}
	stop := h.run(consumer.Each(effect), nil)
	h.wait("position behind the control records", func() bool { return h.number(`SELECT count(*) FROM effects`) > 0 })
	require.NoError(t, stop())
	require.Equal(t, []string{"1"}, h.values())
}

// Property: a partition whose end an open transaction of another program holds back is not caught up.
func TestBlindPartitionIsNotCaughtUp(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	client := kafkatest.Client(t, kgo.TransactionalID(h.topic))
	require.NoError(t, client.BeginTransaction())
	require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: h.topic, Value: []byte("open")}).FirstErr())
	h.tune = func(c *consumer.Consumer) { consumer.LookEvery(c, time.Millisecond) }
	stop := h.run(consumer.Each(effect), nil)
	h.wait("said", func() bool { return h.logged("holds back records of the partition") > 1 })
	const caughtUp = `SELECT count(*) FROM effectonce.consumer_positions WHERE caught_up_at IS NOT NULL`
	require.Zero(t, h.number(caughtUp))
	require.NoError(t, client.EndTransaction(t.Context(), kgo.TryAbort))
	h.wait("caught up", func() bool { return h.number(caughtUp) == 1 })
	require.NoError(t, stop())
}

// Property: producers whose clocks are wrong by hours or decades, in the ID and in the record's
// timestamp, double nothing and lose nothing: each message has its effect once, and its duplicate
// is recognised. Row C45 of guarantees.md.
func TestWrongClocksOfProducers(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	for _, off := range []time.Duration{-500_000 * time.Hour, -50 * time.Hour, -2 * time.Hour, 0, 2 * time.Hour, 50 * time.Hour, 200_000 * time.Hour} {
		at := time.Now().Add(off)
		id := dedup.PublishID("p", uuid.New(), "id", at)
		stamp := at
		if off > 0 {
			stamp = time.Now() // brokers refuse timestamps of the future
		}
		for range 2 {
			h.produceRecords(&kgo.Record{Value: []byte(off.String()), Timestamp: stamp, Headers: headers("message-id=" + id.String())})
		}
	}
	h.untilHandled(14, h.run(consumer.Each(effect), nil))
	require.Equal(t, 7, h.number(`SELECT count(*) FROM effects`))
	require.Zero(t, h.number(`SELECT count(*) FROM effectonce.parked_messages`), "nothing was forgotten, so every claim proves its message fresh")
}

// Property: at every isolation level, two consumers of one message cause one effect. Rows C4, C5 of
// guarantees.md.
func TestIsolationLevels(t *testing.T) {
	t.Parallel()
	eachOf(t, []string{"read committed", "repeatable read", "serializable"}, func(t *testing.T, h *harness, level string) {
		t.Helper()
		cfg := consumer.Config{Group: "g", Topics: []string{h.topic}, Isolation: pgx.TxIsoLevel(level)}
		engines := []*consumer.Engine{
			consumer.NewEngine(t, h.pool, consumer.Each(effect), cfg), consumer.NewEngine(t, h.pool, consumer.Each(effect), cfg),
		}
		// Both believe that they hold the partition: each has its own position to advance, so
		// that only the claims decide (row C11).
		done := make(chan error, 2)
		for i, engine := range engines {
			go func() { done <- engine.ApplyAll(t.Context(), int32(i), 0, 2000, 50) }()
		}
		require.NoError(t, <-done)
		require.NoError(t, <-done)
		require.Equal(t, 2000, h.number(`SELECT count(*) FROM effects`))
		require.Equal(t, 2000, h.number(`SELECT count(DISTINCT message_id) FROM effects`))
	})
}

// Property: handlers that deadlock with each other are retried until all have their effect, and none
// is parked. The first two do so for certain: each locks its second account when the other has
// locked it. Row C8 of guarantees.md.
func TestDeadlockingHandlersAreRetried(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 2)
	h.exec(`CREATE TABLE account (id int PRIMARY KEY, balance int)`)
	h.exec(`INSERT INTO account VALUES (0, 0), (1, 0)`)
	for i := range 60 {
		h.produceRecords(&kgo.Record{Partition: int32(i % 2), Value: []byte{byte('0' + i%2)}})
	}
	var deadlocks atomic.Int64
	locked := []chan struct{}{make(chan struct{}), make(chan struct{})}
	meet := []sync.Once{{}, {}}
	h.untilEffects(60, h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		first := int(msg.Value[0] - '0')
		for _, id := range []int{first, 1 - first} {
			if _, err := tx.Exec(ctx, `UPDATE account SET balance = balance + 1 WHERE id = $1`, id); err != nil {
				if pgerr.Is(err, pgerr.Deadlock) {
					deadlocks.Add(1)
				}
				return err
			}
			meet[first].Do(func() {
				close(locked[first])
				select {
				case <-locked[1-first]:
				case <-ctx.Done():
				}
			})
		}
		return effect(ctx, tx, msg)
	}), func(c *consumer.Config) { c.BatchMax = 5 }))
	require.Positive(t, deadlocks.Load(), "the premise")
	require.Zero(t, h.number(`SELECT count(*) FROM effectonce.parked_messages`))
	require.Equal(t, 120, h.number(`SELECT sum(balance) FROM account`))
}

// Property: a deadlock or a serialization failure of a handler's statement is no attempt at the
// message, which is handled although AttemptsMax is 1; a handler that meets nothing else is parked in
// the end. Row C8 of guarantees.md.
func TestConflictsAreNoAttempts(t *testing.T) {
	t.Parallel()
	eachOf(t, []string{"40001", "40P01"}, func(t *testing.T, h *harness, state string) {
		t.Helper()
		h.produce("one", "two")
		var runs [2]atomic.Int64
		stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			if n := runs[msg.Offset].Add(1); msg.Offset == 1 || n <= 8 {
				_, err := tx.Exec(ctx, fmt.Sprintf(`DO $$ BEGIN RAISE EXCEPTION 'as a concurrent transaction' USING ERRCODE = '%s'; END $$`, state))
				return err
			}
			return effect(ctx, tx, msg)
		}), func(c *consumer.Config) {
			c.AttemptsMax, c.BatchMax, c.RetryMin, c.RetryMax, c.ParkShareMax = 1, 1, time.Millisecond, 2*time.Millisecond, 1
		})
		h.wait("the second message is parked", func() bool { return h.number(`SELECT count(*) FROM effectonce.parked_messages`) == 1 })
		require.NoError(t, stop())
		h.waitEffects(1)
		require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE "offset" = 1 AND reason = 'failed' AND attempts = 1`))
		require.EqualValues(t, 9, runs[0].Load())
		require.EqualValues(t, 11, runs[1].Load())
	})
}

// Property: settings out of bounds are all reported at once, with field, value and bound.
func TestConfigReportsAllProblems(t *testing.T) {
	t.Parallel()
	_, err := consumer.New(nil, nil, nil, consumer.Config{
		Topics: []string{"bad topic"}, BatchMax: -1, Isolation: "chaos", RetryMin: time.Minute, RetryMax: time.Second, Schema: "X",
	})
	require.Error(t, err)
	for _, part := range []string{"Group", "bad topic", "BatchMax -1", "chaos", "RetryMin 1m0s", `"X"`, "pool is nil", "handler is nil"} {
		require.ErrorContains(t, err, part)
	}
	_, err = consumer.New(pgtest.Pool(t), nil, consumer.Each(effect), consumer.Config{Group: "g", Topics: []string{"t"}, Order: consumer.OrderByKey, Isolation: pgx.RepeatableRead})
	require.ErrorContains(t, err, `want read committed where Order is not OrderByPartition`)
}

// Property: a pool whose protocol cannot work is refused at start, with the one that does, and so
// is a drain that outlasts the rebalance.
func TestWhatCannotWorkIsRefusedAtStart(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	cfg := consumer.Config{Group: "g", Topics: []string{"t"}}
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeExec, pgx.QueryExecModeDescribeExec} {
		pool := h.poolWith(func(config *pgxpool.Config) { config.ConnConfig.DefaultQueryExecMode = mode })
		_, err := consumer.New(pool, nil, consumer.Each(effect), cfg)
		require.ErrorContains(t, err, "cache_describe")
	}
	pool := h.poolWith(func(config *pgxpool.Config) { config.ConnConfig.DescriptionCacheCapacity = 0 })
	_, err := consumer.New(pool, nil, consumer.Each(effect), cfg)
	require.ErrorContains(t, err, "description_cache_capacity 0: want at least 1")
	cfg.DrainMax = 10 * time.Second
	_, err = consumer.New(h.pool, []kgo.Opt{kgo.RebalanceTimeout(5 * time.Second)}, consumer.Each(effect), cfg)
	require.ErrorContains(t, err, "DrainMax 10s: want less than the rebalance timeout")
}

// Property: a name that belongs to another group is refused at start. Row C27 of guarantees.md.
func TestNameOfAnotherGroupIsRefused(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	stop := h.run(consumer.Each(effect), func(c *consumer.Config) { c.Name = "billing" })
	h.wait("registered", func() bool { return h.number(`SELECT count(*) FROM effectonce.consumers`) == 1 })
	require.NoError(t, stop())
	other := h.make(consumer.Each(effect), func(c *consumer.Config) { c.Group, c.Name = "another", "billing" })
	require.ErrorContains(t, other.Run(t.Context()), "choose another consumer name")
}

type valueKey struct{}

// Property: the values of the context that Run or Deliver gets reach handlers; the end of Run's
// does not: the batch in progress may finish.
func TestContextValuesReachHandlers(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	ctx := context.WithValue(t.Context(), valueKey{}, "tenant")
	started, hold := make(chan struct{}, 1), make(chan struct{})
	var seen, over atomic.Value
	handler := consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		seen.Store(fmt.Sprint(ctx.Value(valueKey{})))
		started <- struct{}{}
		<-hold
		over.Store(fmt.Sprint(ctx.Err()))
		return effect(ctx, tx, msg)
	})
	c := h.make(handler, nil)
	cancel, stop := h.begin(ctx, c)
	h.produce("1")
	<-started
	cancel()
	h.wait("it drains", func() bool { return c.Status().Phase == consumer.PhaseDraining })
	close(hold)
	require.NoError(t, stop())
	require.Equal(t, "tenant", seen.Load())
	require.Equal(t, "<nil>", over.Load())
	h.waitEffects(1)

	seen.Store("")
	_, err := h.make(handler, func(cfg *consumer.Config) { cfg.Group += "-delivered" }).Deliver(ctx, &kgo.Record{Topic: h.topic, Value: []byte("1")})
	require.NoError(t, err)
	require.Equal(t, "tenant", seen.Load())
	h.waitEffects(2)
}

// Property: another replica's dedup window, which maintenance uses, is named in the log.
func TestAnotherWindowIsNamed(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	for i, window := range []time.Duration{2 * time.Hour, 3 * time.Hour} {
		stop := h.run(consumer.Each(effect), func(c *consumer.Config) { c.Window = window })
		h.produce("1")
		h.untilHandled(i+1, stop)
	}
	require.Equal(t, 1, h.logged("another dedup window was registered before"))
}
