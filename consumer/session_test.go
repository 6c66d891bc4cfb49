package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/outbox"
)

// Property: what a handler leaves behind and makes the engine's last statements fail costs only its
// message: a long silence, a role without rights, a dead letter that the outbox refuses. Its message
// is parked after its attempts; the others have their effects.
func TestWhatHandlersLeaveBehindCostsOnlyTheirMessage(t *testing.T) {
	t.Parallel()
	type testCase struct {
		setup  string
		spoil  func(ctx context.Context, tx pgx.Tx) error
		config func(*consumer.Config)
		parked string
	}
	each(t, map[string]testCase{
		"idle": {
			spoil:  func(ctx context.Context, _ pgx.Tx) error { pause.For(ctx, 900*time.Millisecond); return nil },
			config: func(c *consumer.Config) { c.IdleTimeout = 300 * time.Millisecond }, parked: "bad failed parked",
		},
		"dead letter": {
			setup: `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '42501'; END $$;
				CREATE TRIGGER refuse BEFORE INSERT ON effectonce.outbox FOR EACH ROW WHEN (NEW.topic = 'refused') EXECUTE FUNCTION refuse()`,
			spoil:  func(context.Context, pgx.Tx) error { return consumer.Permanent(errBad) },
			config: func(c *consumer.Config) { c.OnFailure, c.DeadLetterTopic = consumer.OnFailureDeadLetter, "refused" },
			parked: "bad permanent parked",
		},
	}, func(t *testing.T, h *harness, _ string, tc testCase) {
		t.Helper()
		if tc.setup != "" {
			h.exec(tc.setup)
		}
		h.produce("a", "bad", "b", "c")
		stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			if err := effect(ctx, tx, msg); err != nil || string(msg.Value) != "bad" {
				return err
			}
			return tc.spoil(ctx, tx)
		}), func(c *consumer.Config) {
			c.AttemptsMax = 2
			if tc.config != nil {
				tc.config(c)
			}
		})
		h.wait("parked", func() bool { return slices.Equal(h.parked(), []string{tc.parked}) })
		h.untilEffects(3, stop)
		require.ElementsMatch(t, []string{"a", "b", "c"}, h.values())
	})
}

// Property: a role, a setting or a temporary table of one message does not reach the next one, in any
// shape of handler, and the role may be one that could not end the transaction.
func TestSessionEndsWithItsMessage(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.exec(`ALTER TABLE effects ADD tenant text DEFAULT coalesce(nullif(current_setting('app.tenant', true), ''), 'none'), ADD who text DEFAULT current_user`)
	role := "tenant_" + strings.ReplaceAll(uuid.NewString(), "-", "")
	h.exec(`CREATE ROLE ` + role)
	t.Cleanup(func() {
		_, _ = h.pool.Exec(context.WithoutCancel(t.Context()), `DROP OWNED BY `+role+`; DROP ROLE `+role)
	})
	h.exec(`GRANT INSERT ON effects TO ` + role)
	set := map[string]string{
		"local":   `SET LOCAL app.tenant = 'A'`,
		"comment": "-- name: Tenant :exec\nSET app.tenant = 'A'", // outlasts the transaction
		"config":  `SELECT set_config('app.tenant', 'A', true)`,
		"role":    `SET LOCAL ROLE ` + role,
	}
	var values []string
	for _, name := range []string{"role", "local", "comment", "config"} { // the role comes before the driver has prepared what ends a transaction
		values = append(values, name, "plain", "plain")
	}
	h.produce(values...)
	each := consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if sql := set[string(msg.Value)]; sql != "" {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
		}
		return effect(ctx, tx, msg)
	})
	stop := h.run(each, func(c *consumer.Config) { c.AttemptsMax = 1 })
	h.wait("effects or parked", func() bool { return len(h.values()) == len(values) || len(h.parked()) > 0 })
	require.NoError(t, stop())
	require.Empty(t, h.parked())
	require.Equal(t, 8, h.number(`SELECT count(*) FROM effects WHERE value = 'plain' AND tenant = 'none' AND who = session_user`), "of the next messages")
	require.Equal(t, 3, h.number(`SELECT count(*) FROM effects WHERE value <> 'plain' AND tenant = 'A'`))
	require.Equal(t, 1, h.number(`SELECT count(*) FROM effects WHERE value = 'role' AND who = $1`, role))
}

// Property: one message that changes its session costs the batches of the next thousand only.
func TestBatchesReturnBehindAChangedSession(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	const all = 4000
	h.produce(append([]string{"sets"}, numbered(all-1)...)...)
	h.untilEffects(all, h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if _, err := tx.Exec(ctx, map[bool]string{true: `SET LOCAL app.tenant = 'A'`, false: `SELECT 1`}[string(msg.Value) == "sets"]); err != nil {
			return err
		}
		return effect(ctx, tx, msg)
	}), nil))
	require.Less(t, h.number(`SELECT count(DISTINCT xmin::text) FROM effects`), all/2, "transactions")
}

// errUnless is an error unless err is the expected one.
func errUnless(expected, err error) error {
	if errors.Is(err, expected) {
		return nil
	}
	return fmt.Errorf("want %w, got %w", expected, err)
}

// Property: a rollback to a savepoint takes along what was published since, however the savepoint is
// made; a release keeps it.
func TestSavepointsTakePublishedMessagesAlong(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produce("1")
	publish := func(ctx context.Context, tx pgx.Tx, text string) error {
		return outbox.Publish(ctx, tx, outbox.Message{Topic: "next", Payload: []byte(text)})
	}
	h.untilEffects(1, h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		run := func(sql string) error { _, err := tx.Exec(ctx, sql); return err }
		batch := func(sql ...string) error {
			b := &pgx.Batch{}
			for _, one := range sql {
				b.Queue(one)
			}
			return tx.SendBatch(ctx, b).Close()
		}
		return errors.Join(
			publish(ctx, tx, "kept 1"), run(`SAVEPOINT a`), publish(ctx, tx, "undone"), run(`ROLLBACK TO a -- back`),
			publish(ctx, tx, "undone, too"), run(`rollback transaction to savepoint "a" ;`), publish(ctx, tx, "kept 2"), run(`RELEASE a`),
			errUnless(errBad, pgx.BeginFunc(ctx, tx, func(nested pgx.Tx) error { return errors.Join(publish(ctx, nested, "undone by pgx"), errBad) })),
			run(`SELECT 1; SAVEPOINT c`), publish(ctx, tx, "undone among several"), run(`SELECT 1; ROLLBACK TO c; SELECT 2`),
			batch(`SAVEPOINT b`), publish(ctx, tx, "undone in a batch"), batch(`SELECT 1`, `/* x */ ROLLBACK TO SAVEPOINT b`),
			effect(ctx, tx, msg))
	}), nil))
	require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.outbox WHERE payload = 'kept 1'`))
	require.Equal(t, 2, h.number(`SELECT count(*) FROM effectonce.outbox`))
}

// Property: handlers that ask the consumer's own pool for a connection do not wait for each other for
// ever, although the pool has only as many as there are partitions; nothing is parked.
func TestHandlersMayAskTheSamePool(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 4)
	const each = 30
	for i := range each {
		for p := range int32(4) {
			h.produceEach(p, fmt.Sprint(i))
		}
	}
	pool := h.poolWith(four)
	h.untilEffects(4*each, h.runOn(pool, consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		var one int
		if err := pool.QueryRow(ctx, `SELECT 1`).Scan(&one); err != nil {
			return err
		}
		return effect(ctx, tx, msg)
	}), func(c *consumer.Config) { c.HandlerTimeout = 20 * time.Second }))
	require.Empty(t, h.parked())
}

// Property: a key never waits for another key's pauses: not for one that fails in the same share of
// work, and not if as many keys fail as there are workers. For a block and for a long pause.
func TestNoKeyWaitsForAnothersPauses(t *testing.T) {
	t.Parallel()
	each(t, map[string]func(*consumer.Config){
		"block": func(c *consumer.Config) { block(c); c.RetryMin, c.RetryMax = time.Minute, time.Minute },
		"retry": func(*consumer.Config) {},
	}, func(t *testing.T, h *harness, _ string, config func(*consumer.Config)) {
		t.Helper()
		h.produceKeyed("k1:bad", "a:1", "k2:bad", "b:1", "k3:bad", "c:1", "k4:bad", "d:1")
		handler := failingWith(consumer.RetryAfter(12*time.Minute, errBad), &atomic.Bool{})
		stop := h.run(handler, func(c *consumer.Config) { c.Order, c.Workers, c.ParkShareMax = consumer.OrderByKey, 4, 1; config(c) })
		h.waitEffects(4)
		h.produceKeyed("a:2", "k1:2", "b:2")
		h.untilEffects(6, stop)
		require.NotContains(t, h.values(), "k1:2", "the order of its key")
	})
}

// Property: a stop waits for partitions whose handlers hang, whatever their context, side by side, not one
// after the other, and not forever.
func TestStopBoundsAllPartitionsTogether(t *testing.T) {
	t.Parallel()
	const partitions = 8
	h := newHarness(t, partitions)
	for p := range int32(partitions) {
		h.produceEach(p, "hang")
	}
	leave := make(chan struct{})
	var hanging sync.WaitGroup
	t.Cleanup(func() {
		close(leave)
		hanging.Wait()
	})
	var begun atomic.Int64
	pool := h.poolWith(func(c *pgxpool.Config) { c.MaxConns = partitions + 2 })
	stop := h.runOn(pool, consumer.Each(func(context.Context, pgx.Tx, *consumer.Message) error {
		begun.Add(1)
		hanging.Add(1)
		defer hanging.Done()
		<-leave
		return errBad
	}), func(c *consumer.Config) { c.DrainMax = 100 * time.Millisecond })
	h.wait("all hang", func() bool { return begun.Load() == partitions })
	began := time.Now()
	require.NoError(t, stop())
	require.Less(t, time.Since(began), 15*time.Second, "8 times 4 s one after the other")
	require.Equal(t, -1, h.position(), "nothing was committed")
}

// Property: tombstones are legal: skipped as configured, or given to a handler that can take them;
// they do not stop a partition as failures do.
func TestTombstones(t *testing.T) {
	t.Parallel()
	handler := consumer.JSON(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message, _ payment) error {
		return effect(ctx, tx, msg)
	})
	type testCase struct {
		handler         consumer.Handler
		on              consumer.OnTombstone
		effects, parked int
	}
	each(t, map[string]testCase{
		"parked":  {handler, consumer.OnTombstoneHandle, 30, 30},
		"skipped": {handler, consumer.OnTombstoneSkip, 30, 0},
		"pointer": {consumer.JSON(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message, body *payment) error {
			if body == nil {
				return nil
			}
			return effect(ctx, tx, msg)
		}), consumer.OnTombstoneHandle, 30, 0},
		"batch": {consumer.Decode(consumer.JSONDecoder[payment](), func(ctx context.Context, tx pgx.Tx, msgs []consumer.Decoded[payment]) error {
			for _, msg := range msgs {
				if msg.Offset == 50 {
					return consumer.Blame(msg.Message, consumer.Permanent(errBad))
				}
				if err := effect(ctx, tx, msg.Message); err != nil {
					return err
				}
			}
			return nil
		}), consumer.OnTombstoneSkip, 29, 1},
	}, func(t *testing.T, h *harness, _ string, tc testCase) {
		t.Helper()
		records := make([]*kgo.Record, 60)
		for i := range records {
			records[i] = &kgo.Record{Key: []byte(fmt.Sprint(i)), Headers: newID()}
			if i < 15 || i >= 45 {
				records[i].Value = []byte(`{"order":"x"}`)
			}
		}
		h.produceRecords(records...)
		h.untilHandled(60, h.run(tc.handler, func(c *consumer.Config) { c.OnTombstone = tc.on }))
		require.Len(t, h.values(), tc.effects)
		require.Len(t, h.parked(), tc.parked)
		require.Equal(t, tc.parked%30, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE "offset" = 50`), "the one that Blame names")
		if tc.parked == 30 {
			h.retry()
			stop := h.run(tc.handler, func(c *consumer.Config) { c.OnTombstone = consumer.OnTombstoneSkip })
			h.wait("skipped when they are retried", func() bool { return len(h.parked()) == 0 })
			require.NoError(t, stop())
			require.Len(t, h.values(), tc.effects)
		}
	})
}

// Property: a mirrored topic counts as its source where Config.Aliases says so: a failover to it
// repeats nothing, although its offsets differ.
func TestMirroredTopicRepeatsNothing(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	record := func(topic string, i int, offset int64) *kgo.Record {
		return &kgo.Record{Topic: topic, Offset: offset, Timestamp: time.Now(), Value: []byte(fmt.Sprint(i)), Headers: headers("message-id=" + fmt.Sprint("m", i))}
	}
	mirror := "us-east." + h.topic
	c := h.make(consumer.Each(effect), func(c *consumer.Config) {
		c.Topics, c.Aliases = []string{h.topic, mirror}, map[string]string{mirror: h.topic}
	})
	var source, copied []*kgo.Record
	for i := range 50 {
		if source = append(source, record(h.topic, i, int64(i+10))); i < 40 {
			copied = append(copied, record(mirror, i, int64(i)))
		}
	}
	copied = append(copied, record(mirror, 50, 40))
	_, err := c.Deliver(t.Context(), source...)
	require.NoError(t, err)
	sum, err := c.Deliver(t.Context(), copied...)
	require.NoError(t, err)
	require.Equal(t, consumer.Delivered{Fresh: 1, Duplicates: 40}, sum)
	require.Len(t, h.values(), 51)
	require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.consumers`))
}

// Property: a stop in the first seconds of a slow topic repeats little: a batch is bounded in time.
func TestBatchesAreBoundedInTime(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produce(numbered(300)...)
	var calls atomic.Int64
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		calls.Add(1)
		pause.For(ctx, 20*time.Millisecond)
		return effect(ctx, tx, msg)
	}), func(c *consumer.Config) { c.BatchTimeMax, c.DrainMax = 400*time.Millisecond, time.Millisecond })
	h.wait("some batches", func() bool { return calls.Load() >= 100 })
	require.NoError(t, stop())
	require.LessOrEqual(t, int(calls.Load())-len(h.values()), 25, "handled, and rolled back")
}

// Property: order per key holds where many messages fail once, in each shape of handler, alone or
// together with others whose failure is not known to be theirs.
func TestOrderOutlivesTemporaryFailures(t *testing.T) {
	t.Parallel()
	eachOf(t, []string{"each", "queued", "batch"}, func(t *testing.T, h *harness, shape string) {
		t.Helper()
		messages := versions(6, 0, 30)
		h.produceKeyed(messages...)
		var failed sync.Map
		h.untilEffects(len(messages), h.run(shapes(func(msg *consumer.Message) error {
			if _, again := failed.LoadOrStore(msg.Offset, true); !again && msg.Offset%7 == 3 {
				return errBad
			}
			return nil
		})[shape], func(c *consumer.Config) { c.Order, c.Workers, c.ParkShareMax = consumer.OrderByKey, 4, 1 }))
		require.Equal(t, len(messages), h.number(`SELECT count(DISTINCT value) FROM effects`))
		require.Zero(t, inversions(h))
	})
}

// Property: a Decode of batches whose messages are all skipped tombstones does not call the handler.
func TestBatchOfSkippedTombstonesIsNotHandled(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	c := h.make(consumer.Decode(consumer.JSONDecoder[struct{}](), func(context.Context, pgx.Tx, []consumer.Decoded[struct{}]) error { return errBad }),
		func(c *consumer.Config) { c.OnTombstone = consumer.OnTombstoneSkip })
	d, err := c.Deliver(t.Context(), &kgo.Record{Topic: h.topic, Timestamp: time.Now(), Key: []byte("k")})
	require.NoError(t, err)
	require.Equal(t, consumer.Delivered{Fresh: 1}, d)
}
