package consumer_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/outbox"
)

// Property: nothing that one handler leaves in its session reaches the next message, or outlasts the
// message: temporary tables, sequences, held cursors, session locks, savepoints. Row C19b of guarantees.md.
func TestNothingReachesTheNextMessage(t *testing.T) {
	t.Parallel()
	const locks = `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711`
	for name, c := range map[string]struct {
		a, b, c string // what the handlers of three messages send
		effects int
		parked  int
	}{
		"table":       {a: `CREATE TEMP TABLE stage (v text)`, b: `CREATE TEMPORARY TABLE stage (v text)`, c: `CREATE LOCAL TEMP TABLE stage (v text)`, effects: 3},
		"drop":        {a: `CREATE TEMP TABLE stage ON COMMIT DROP AS SELECT 1`, b: `CREATE TEMP TABLE stage ON COMMIT DROP AS SELECT 1`, effects: 3},
		"sequence":    {a: `CREATE TEMP SEQUENCE s`, b: `CREATE TEMP SEQUENCE s`, effects: 3},
		"cursor":      {a: `DECLARE c CURSOR WITH HOLD FOR SELECT 1`, b: `DECLARE c CURSOR WITH HOLD FOR SELECT 1`, effects: 3},
		"lock":        {a: `SELECT pg_advisory_lock(4711)`, effects: 3},
		"deallocated": {a: `DEALLOCATE ALL`, effects: 3},
		"savepoint":   {a: `SAVEPOINT s`, c: `ROLLBACK TO SAVEPOINT s`, effects: 2, parked: 1},
		"its own":     {b: `SAVEPOINT s; SELECT 1`, c: `SELECT 1; SAVEPOINT s`, effects: 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			h.produceAll("a", "b", "c")
			sent := map[string]string{"a": c.a, "b": c.b, "c": c.c}
			stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
				if sql := sent[string(msg.Value)]; sql != "" {
					if _, err := tx.Exec(ctx, sql); err != nil {
						return err
					}
				}
				return effect(ctx, tx, msg)
			}), func(c *consumer.Config) { c.AttemptsMax, c.ParkShareMax = 2, 1 })
			h.wait("all are done", func() bool {
				return h.position() == 3 && h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE state = 'retry'`) == 0
			})
			require.Equal(t, c.effects, h.number(`SELECT count(*) FROM effects`))
			require.Len(t, h.parked(), c.parked)
			h.wait("session locks are free", func() bool { return h.number(locks) == 0 })
			require.NoError(t, stop())
		})
	}
}

// Property: a statement that is queued after the queue was sent fails its message; it is not lost in
// silence.
func TestQueueAfterItWasSentFails(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceAll("a")
	stop := h.run(consumer.Queued(func(_ context.Context, q *consumer.Queue, msg *consumer.Message) error {
		q.Queue(`SELECT 1`).QueryRow(func(row pgx.Row) error {
			q.Queue(`INSERT INTO effects (value) VALUES ($1)`, string(msg.Value))
			return row.Scan(nil)
		})
		return nil
	}), nil)
	h.waitParked("permanent")
	require.NoError(t, stop())
}

// Property: a consumer whose group left messages waiting under another name does not start: nobody would
// try them, and later ones of their keys would overtake them.
func TestOtherNameWaitsForWhatIsLeft(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceKeyed("k:0", "k:1")
	var fine atomic.Bool
	handler := consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if string(msg.Value) == "k:0" && !fine.Load() {
			return consumer.RetryAfter(2*time.Second, errBad)
		}
		return effect(ctx, tx, msg)
	})
	stop := h.run(handler, nil)
	h.wait("parked", func() bool { return len(h.parked()) == 2 })
	require.NoError(t, stop())
	renamed := func(c *consumer.Config) { c.Name = "renamed-" + h.topic }
	require.ErrorContains(t, h.make(handler, renamed).Run(t.Context()), h.topic+"/"+h.topic)
	fine.Store(true)
	stop = h.run(handler, nil)
	h.waitEffects(2)
	require.NoError(t, stop())
	h.produceKeyed("k:2")
	stop = h.run(handler, renamed)
	h.waitEffects(3)
	require.NoError(t, stop())
	require.Equal(t, []string{"k:0", "k:1", "k:2"}, h.values())
}

// Property: by position, a message that ends its session in COMMIT is found and parked, as by ID. Row C18
// of guarantees.md.
func TestMessageThatEndsItsSessionInCommitIsFound(t *testing.T) {
	t.Parallel()
	for name, level := range map[string]consumer.Dedup{"by ID": consumer.DedupByID, "by position": consumer.DedupByPosition} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			h.produceAll("ok", "a", "b")
			h.exec(`CREATE FUNCTION cut() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.value = 'a' THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF; RETURN NULL; END $$;
				CREATE CONSTRAINT TRIGGER cut AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION cut()`)
			stop := h.run(consumer.Each(effect), func(c *consumer.Config) { c.Dedup, c.AttemptsMax = level, 3 })
			h.wait("parked", func() bool {
				return h.number(`SELECT count(*) FROM effects WHERE value <> 'a'`) == 2 && h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE state = 'parked'`) == 1
			})
			require.NoError(t, stop())
			require.Len(t, h.parked(), 1)
		})
	}
}

// Property: a handler that writes as a replica, so that triggers do not run, does not leave the messages
// behind a retried one waiting.
func TestReplicaRoleReleasesTheKey(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	var fails atomic.Int32
	h.produceKeyed("k:0", "k:1", "k:2")
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if _, err := tx.Exec(ctx, `SET LOCAL session_replication_role = replica`); err != nil {
			return err
		}
		if string(msg.Value) == "k:0" && fails.Add(1) < 3 {
			return consumer.RetryAfter(1100*time.Millisecond, errBad)
		}
		return effect(ctx, tx, msg)
	}), func(c *consumer.Config) { c.ParkShareMax = 1 })
	h.waitEffects(3)
	require.NoError(t, stop())
	require.Equal(t, []string{"k:0", "k:1", "k:2"}, h.values())
}

// Property: a panic in a source of CopyFrom fails its message; a number of attempts that an operator made
// negative is none.
func TestCopySourceThatPanicsFailsItsMessage(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceAll("a", "b")
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		_, err := tx.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"value"}, pgx.CopyFromFunc(func() ([]any, error) {
			panic("source of " + string(msg.Value))
		}))
		return err
	}), func(c *consumer.Config) { c.AttemptsMax, c.ParkShareMax = 2, 1 })
	h.waitParked("failed", "failed")
	h.exec(`UPDATE effectonce.parked_messages SET attempts = -5, state = 'retry', retry_at = clock_timestamp(), released_at = clock_timestamp()`)
	h.wait("tried again", func() bool {
		return h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE attempts > -5`) == 2
	})
	require.NoError(t, stop())
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
	var id string
	require.NoError(t, h.pool.QueryRow(t.Context(), `SELECT id::text FROM effectonce.outbox`).Scan(&id))
	next := h.make(consumer.Each(effect), func(c *consumer.Config) { c.Group, c.Topics = h.topic+"-next", []string{"next"} })
	_, err = next.Deliver(t.Context())
	require.NoError(t, err)
	h.exec(`UPDATE effectonce.consumers SET forgotten_to = now() - interval '7 days'`) // as maintenance does
	d, err := next.Deliver(t.Context(), &kgo.Record{Topic: "next", Timestamp: time.Now(), Value: []byte("v"), Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte(id)}}})
	require.NoError(t, err)
	require.Equal(t, consumer.Delivered{Fresh: 1}, d)
}

// Property: a clean stop is no attempt at parked messages: not at those that had not begun, nor at the one
// that it ended.
func TestStopIsNoAttemptAtParkedMessages(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceAll("a", "b", "c")
	var repaired atomic.Bool
	begun := make(chan struct{}, 3)
	stop := h.run(consumer.Each(func(ctx context.Context, _ pgx.Tx, _ *consumer.Message) error {
		if !repaired.Load() {
			return consumer.Permanent(errBad)
		}
		begun <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}), func(c *consumer.Config) { c.AttemptsMax, c.ParkShareMax, c.DrainMax = 1, 1, 10*time.Millisecond })
	h.waitParked("permanent", "permanent", "permanent")
	repaired.Store(true)
	h.retry()
	testwait.Chan(t, "a handler", begun)
	require.NoError(t, stop())
	require.Equal(t, 3, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE state = 'retry' AND attempts = 0`))
}

// Property: what waited behind a message that is retried runs in transactions of the usual size: other
// keys, a pause and a stop do not wait for all of it.
func TestReleasedBacklogLetsOthersPass(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	const n = 200 // more than the first transaction, whose size is that of transactions which park
	var values []string
	for i := range n {
		values = append(values, fmt.Sprint("k:", i))
	}
	var repaired atomic.Bool
	h.produceKeyed(values...)
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if !repaired.Load() {
			return consumer.Permanent(errBad)
		}
		if _, err := tx.Exec(ctx, `SELECT pg_sleep(0.005)`); err != nil {
			return err
		}
		return effect(ctx, tx, msg)
	}), func(c *consumer.Config) { c.ParkShareMax, c.BatchTimeMax = 1, 100*time.Millisecond })
	h.wait("parked", func() bool { return len(h.parked()) == n })
	repaired.Store(true)
	h.retry()
	h.wait("it begins", func() bool { return h.number(`SELECT count(*) FROM effects`) > 0 })
	h.produceKeyed("other:0")
	h.waitEffects(n + 1)
	require.NoError(t, stop())
	require.Less(t, h.number(`SELECT count(*) FROM effects WHERE n < (SELECT n FROM effects WHERE value = 'other:0')`), n-10)
}

// Property: the status does not name a parked message that failed again: nothing waits for it.
func TestStatusForgetsAReleasedMessage(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceAll("a")
	var turn atomic.Int32
	c := h.make(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		switch turn.Add(1) {
		case 1, 3:
			return consumer.Permanent(errBad)
		case 2:
			_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'; END $$`)
			return err
		}
		return effect(ctx, tx, msg)
	}), func(c *consumer.Config) { c.ParkShareMax = 1 })
	cancel, ended := h.begin(t.Context(), c)
	h.waitParked("permanent")
	h.retry()
	h.wait("parked again", func() bool {
		return turn.Load() == 3 && h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE state = 'parked'`) == 1
	})
	h.wait("nothing is wrong", func() bool { return c.Status().Partitions[0].Err == "" })
	cancel()
	require.NoError(t, ended())
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

// asking asks for the status whenever something is logged.
type asking struct {
	slog.Handler

	c *atomic.Pointer[consumer.Consumer]
}

func (a asking) Handle(ctx context.Context, r slog.Record) error {
	if c := a.c.Load(); c != nil && !strings.Contains(r.Message, "rejoining") {
		_ = c.Status()
	}
	return a.Handler.Handle(ctx, r)
}

// Property: nothing is logged under a mutex that Status takes.
func TestLoggerMayAskForTheStatus(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceAll("a")
	stop := h.run(consumer.Each(effect), nil)
	h.wait("position", func() bool { return h.position() == 1 })
	require.NoError(t, stop())
	h.exec(`UPDATE effectonce.consumer_positions SET next_offset = 1000`) // the topic has lost its end
	var known atomic.Pointer[consumer.Consumer]
	c := h.make(consumer.Each(effect), func(c *consumer.Config) {
		c.Logger = slog.New(asking{slog.NewTextHandler(h.log, nil), &known})
	})
	known.Store(c)
	consumer.LookEvery(c, 100*time.Millisecond)
	cancel, ended := h.begin(t.Context(), c)
	h.wait("it says so again", func() bool { return h.logged("still halts") > 1 })
	cancel()
	require.NoError(t, ended())
}
