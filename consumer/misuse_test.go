package consumer_test

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: a handler that ends the transaction, whatever way it finds, loses no effect and doubles
// none: it is parked for what it did, and every other message of its batch has its effect once. If
// it bypasses the transaction, the server refuses its COMMIT.
func TestHandlerCannotEndTheTransaction(t *testing.T) {
	t.Parallel()
	type testCase struct {
		ofConnection bool     // not through the tx
		ignores      bool     // the errors
		sends        []string // empty: tx.Commit
	}
	each(t, map[string]testCase{
		"commit":                               {},
		"ignored commit by sql":                {false, true, []string{"COMMIT"}},
		"commit of the connection":             {true, false, []string{"COMMIT"}},
		"ignored commit of the connection":     {true, true, []string{"COMMIT"}},
		"commit and begin of the connection":   {true, true, []string{"COMMIT", "BEGIN"}},
		"rollback and begin of the connection": {true, true, []string{"ROLLBACK", "BEGIN"}},
	}, func(t *testing.T, h *harness, _ string, tc testCase) {
		t.Helper()
		h.produceKeyed("a:1", "b:1", "c:bad", "d:1", "e:1")
		h.untilHandled(5, h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			if err := effect(ctx, tx, msg); err != nil || string(msg.Value) != "c:bad" {
				return err
			}
			if len(tc.sends) == 0 {
				return tx.Commit(ctx)
			}
			exec := tx.Exec
			if tc.ofConnection {
				exec = tx.Conn().Exec
			}
			for _, sql := range tc.sends {
				if _, err := exec(ctx, sql); err != nil && !tc.ignores {
					return err
				}
			}
			return nil
		}), nil))
		require.Equal(t, []string{"a:1", "b:1", "d:1", "e:1"}, h.values())
		require.Equal(t, []string{"c:bad permanent parked"}, h.parked())
		require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE error LIKE '%transaction%'`))
	})
}

// sessionEnds waits until the server has ended a session.
func sessionEnds(ctx context.Context, conn *pgx.Conn) error {
	look, err := pgx.ConnectConfig(ctx, conn.Config())
	if err != nil {
		return err
	}
	defer func() { _ = look.Close(context.WithoutCancel(ctx)) }()
	every := time.NewTicker(10 * time.Millisecond)
	defer every.Stop()
	for there := true; there; <-every.C {
		if err := look.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)`, int64(conn.PgConn().PID())).Scan(&there); err != nil {
			return err
		}
	}
	return nil
}

// Property: misuse by a handler affects only its message, which is parked for it; the others have
// their effects. Rows C19, C20, C46 of guarantees.md.
func TestMisuseIsParkedForWhatItIs(t *testing.T) {
	t.Parallel()
	leave := make(chan struct{})
	type testCase struct {
		misbehave func(ctx context.Context, tx pgx.Tx) error
		says      string
	}
	each(t, map[string]testCase{
		"swallowed error": {func(ctx context.Context, tx pgx.Tx) error { _, _ = tx.Exec(ctx, `SELECT 1/0`); return nil }, "one of its statements failed"},
		"panic":           {func(context.Context, pgx.Tx) error { panic("boom") }, "handler panicked: boom"},
		"goexit":          {func(context.Context, pgx.Tx) error { runtime.Goexit(); return nil }, "Goexit"},
		"open result": {func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Query(ctx, `SELECT generate_series(1, 100000)`) //nolint:sqlclosecheck // the mistake under test
			return err
		}, "close the rows"},
		"two goroutines": {func(ctx context.Context, tx pgx.Tx) error {
			var both sync.WaitGroup
			var met atomic.Bool
			for range 2 {
				both.Go(func() {
					for !met.Load() { // also on a machine that starts the second one late
						if _, err := tx.Exec(ctx, `SELECT pg_sleep(0.01)`); err != nil {
							met.Store(true)
						}
					}
				})
			}
			both.Wait()
			return nil
		}, "two goroutines"},
		"too slow":        {func(ctx context.Context, _ pgx.Tx) error { <-ctx.Done(); return ctx.Err() }, "longer than HandlerTimeout"},
		"too slow in SQL": {func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Exec(ctx, `SELECT pg_sleep(60)`); return err }, "longer than HandlerTimeout"},
		"too slow in many statements": {func(ctx context.Context, tx pgx.Tx) error {
			for {
				if _, err := tx.Exec(ctx, `SELECT 1`); err != nil {
					return err
				}
			}
		}, "longer than HandlerTimeout"},
		"idle": {func(ctx context.Context, tx pgx.Tx) error {
			if err := sessionEnds(ctx, tx.Conn()); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, `SELECT 1`)
			return err
		}, "IdleTimeout"},
		"ignores its context": {func(context.Context, pgx.Tx) error { <-leave; return nil }, "ignored the end of its context"},
	}, func(t *testing.T, h *harness, name string, tc testCase) {
		t.Helper()
		switch name {
		case "idle", "too slow", "too slow in SQL", "too slow in many statements", "ignores its context":
			longtest.Only(t, "limits of real seconds")
		}
		h.produceKeyed("a:1", "b:bad", "c:1")
		h.untilHandled(3, h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			if strings.HasSuffix(string(msg.Value), "bad") {
				return tc.misbehave(ctx, tx)
			}
			return effect(ctx, tx, msg)
		}), func(c *consumer.Config) {
			c.AttemptsMax = 2
			switch name { // far apart, or a slow machine takes one for the other; the rest is about neither
			case "idle":
				c.HandlerTimeout, c.IdleTimeout = 10*time.Second, 500*time.Millisecond
			case "too slow", "too slow in SQL", "too slow in many statements", "ignores its context":
				c.HandlerTimeout, c.IdleTimeout = 3*time.Second, 500*time.Millisecond
			}
		}))
		if name == "ignores its context" {
			close(leave) // abandoned handlers release their connections
		}
		require.Equal(t, []string{"a:1", "c:1"}, h.values())
		require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE error LIKE '%' || $1 || '%'`, tc.says), h.log.String())
	})
}

// Property: a handler that keeps its transaction gets an error when it uses it later, which is
// reported, and it touches no other message's transaction.
func TestKeptTransactionIsRefusedAndReported(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceKeyed("a:1", "a:2")
	var kept pgx.Tx
	var late error
	h.untilEffects(2, h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if kept != nil {
			_, late = kept.Exec(ctx, `INSERT INTO effects (value) VALUES ('late')`)
		}
		kept = tx
		return effect(ctx, tx, msg)
	}), nil))
	require.ErrorIs(t, late, pgx.ErrTxClosed)
	require.Contains(t, h.log.String(), "used its transaction after it returned")
}

// Property: if a batch handler names the failing message, the batch is not halved. If it names a
// message that it did not get, that is a failure and not a crash, and the failing message is still
// found.
func TestBatchNamesTheCulprit(t *testing.T) {
	t.Parallel()
	each(t, map[string]func(*consumer.Message) *consumer.Message{
		"the culprit":     func(msg *consumer.Message) *consumer.Message { return msg },
		"another message": func(*consumer.Message) *consumer.Message { return &consumer.Message{} },
	}, func(t *testing.T, h *harness, name string, culprit func(*consumer.Message) *consumer.Message) {
		t.Helper()
		h.produceKeyed("a:1", "b:bad", "c:1")
		calls := 0
		stop := h.run(consumer.Batch(func(ctx context.Context, tx pgx.Tx, msgs []*consumer.Message) error {
			calls++
			for _, msg := range msgs {
				if strings.HasSuffix(string(msg.Value), "bad") {
					return consumer.Blame(culprit(msg), errBad)
				}
				if err := effect(ctx, tx, msg); err != nil {
					return err
				}
			}
			return nil
		}), func(c *consumer.Config) { c.AttemptsMax = 1 })
		h.waitParked("failed")
		h.untilHandled(3, stop)
		require.Equal(t, []string{"a:1", "c:1"}, h.values())
		if name == "the culprit" {
			require.Equal(t, 3, calls, "the batch, what stands before the culprit, what stands behind it")
		}
	})
}

// Property: a statement that is queued after the queue was sent fails its message; it is not lost in
// silence.
func TestQueueAfterItWasSentFails(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produce("a")
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

// Property: a panic in a source of CopyFrom fails its message; a number of attempts that an operator made
// negative is none.
func TestCopySourceThatPanicsFailsItsMessage(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produce("a", "b")
	stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		_, err := tx.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"value"}, pgx.CopyFromFunc(func() ([]any, error) {
			panic("source of " + string(msg.Value))
		}))
		return err
	}), func(c *consumer.Config) { c.AttemptsMax, c.ParkShareMax = 2, 1 })
	h.waitParked("failed", "failed")
	h.exec(`UPDATE effectonce.parked_messages SET attempts = -5, state = 'retry', retry_at = clock_timestamp(), released_at = clock_timestamp()`)
	h.waitNumber(2, `SELECT count(*) FROM effectonce.parked_messages WHERE attempts > -5`)
	require.NoError(t, stop())
}

// Property: nothing that one handler leaves in its session reaches the next message, or outlasts the
// message: temporary tables, sequences, held cursors, session locks, savepoints. Row C19b of guarantees.md.
func TestNothingReachesTheNextMessage(t *testing.T) {
	t.Parallel()
	const locks = `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711`
	type testCase struct {
		a, b, c string // what the handlers of three messages send
		effects int
		parked  int
	}
	each(t, map[string]testCase{
		"table":       {a: `CREATE TEMP TABLE stage (v text)`, b: `CREATE TEMPORARY TABLE stage (v text)`, c: `CREATE LOCAL TEMP TABLE stage (v text)`, effects: 3},
		"drop":        {a: `CREATE TEMP TABLE stage ON COMMIT DROP AS SELECT 1`, b: `CREATE TEMP TABLE stage ON COMMIT DROP AS SELECT 1`, effects: 3},
		"sequence":    {a: `CREATE TEMP SEQUENCE s`, b: `CREATE TEMP SEQUENCE s`, effects: 3},
		"cursor":      {a: `DECLARE c CURSOR WITH HOLD FOR SELECT 1`, b: `DECLARE c CURSOR WITH HOLD FOR SELECT 1`, effects: 3},
		"lock":        {a: `SELECT pg_advisory_lock(4711)`, effects: 3},
		"deallocated": {a: `DEALLOCATE ALL`, effects: 3},
		"savepoint":   {a: `SAVEPOINT s`, c: `ROLLBACK TO SAVEPOINT s`, effects: 2, parked: 1},
		"its own":     {b: `SAVEPOINT s`, c: `SAVEPOINT s -- again`, effects: 3},
		"several":     {a: `SELECT 1; CREATE TEMP TABLE stage (v text)`, b: `SELECT 1; CREATE TEMP TABLE stage (v text)`, effects: 3},
		"in several":  {a: `SELECT 1; SAVEPOINT s`, b: `SAVEPOINT s; ROLLBACK TO s; SELECT 1`, c: "-- lock; release\nSELECT 1", effects: 3},
	}, func(t *testing.T, h *harness, _ string, c testCase) {
		t.Helper()
		h.produce("a", "b", "c")
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

// Property: a handler that writes as a replica, so that triggers do not run, does not leave the messages
// behind a retried one waiting.
func TestReplicaRoleReleasesTheKey(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	var fails atomic.Int32
	h.produceKeyed("k:0", "k:1", "k:2")
	h.untilEffects(3, h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if _, err := tx.Exec(ctx, `SET LOCAL session_replication_role = replica`); err != nil {
			return err
		}
		if string(msg.Value) == "k:0" && fails.Add(1) < 3 {
			return consumer.RetryAfter(1100*time.Millisecond, errBad)
		}
		return effect(ctx, tx, msg)
	}), func(c *consumer.Config) { c.ParkShareMax = 1 }))
	require.Equal(t, []string{"k:0", "k:1", "k:2"}, h.values())
}

// Property: no function of the user ends the process or the partition, whether it panics, ends its
// goroutine, or returns an error whose methods panic: the message is parked, the others have their
// effects once.
func TestUserFunctionsAreGuarded(t *testing.T) {
	t.Parallel()
	breaks := map[string]func(){"panic": func() { panic("boom") }, "goexit": runtime.Goexit}
	bad := func(msg *consumer.Message) bool { return strings.HasPrefix(string(msg.Value), "bad") }
	decoder := func(broken func()) consumer.Decoder[string] {
		return consumer.DecoderFunc[string](func(msg *consumer.Message) (string, error) {
			if bad(msg) {
				broken()
			}
			return string(msg.Value), nil
		})
	}
	around := func(before, after func()) consumer.Middleware {
		return consumer.Around(func(ctx context.Context, _ pgx.Tx, msgs []*consumer.Message, next func(context.Context) error) error {
			if bad(msgs[0]) {
				before()
			}
			err := next(ctx)
			if bad(msgs[0]) {
				after()
			}
			return err
		})
	}
	nothing := func() {}
	places := map[string]func(broken func()) (consumer.Handler, consumer.Middleware){
		"callback of a queued statement": func(broken func()) (consumer.Handler, consumer.Middleware) {
			return consumer.Queued(func(_ context.Context, q *consumer.Queue, msg *consumer.Message) error {
				q.Queue(`INSERT INTO effects (message_id, value) VALUES ($1, $2)`, [16]byte(msg.ID), string(msg.Value))
				if bad(msg) {
					q.Queue(`SELECT 1`).QueryRow(func(pgx.Row) error { broken(); return nil })
				}
				return nil
			}), nil
		},
		"decoder": func(broken func()) (consumer.Handler, consumer.Middleware) {
			return consumer.Decode(decoder(broken), func(ctx context.Context, tx pgx.Tx, msg *consumer.Message, _ string) error {
				return effect(ctx, tx, msg)
			}), nil
		},
		"middleware, before": func(broken func()) (consumer.Handler, consumer.Middleware) {
			return consumer.Each(effect), around(broken, nothing)
		},
		"middleware, after": func(broken func()) (consumer.Handler, consumer.Middleware) {
			return consumer.Each(effect), around(nothing, broken)
		},
	}
	for _, shape := range []string{"each", "queued", "batch"} {
		places[shape] = func(broken func()) (consumer.Handler, consumer.Middleware) {
			return shapes(func(msg *consumer.Message) error {
				if bad(msg) {
					broken()
				}
				return nil
			})[shape], nil
		}
	}
	for place, handlerOf := range places {
		for how, broken := range breaks {
			t.Run(place+", "+how, func(t *testing.T) {
				t.Parallel()
				h := newHarness(t, 1)
				h.produce("1", "2", "bad", "3", "4")
				handler, middleware := handlerOf(broken)
				h.untilHandled(5, h.run(handler, func(c *consumer.Config) {
					c.AttemptsMax = 2
					if middleware != nil {
						c.Middleware = []consumer.Middleware{middleware}
					}
				}))
				require.Equal(t, []string{"1", "2", "3", "4"}, h.values())
				require.Len(t, h.parked(), 1)
				require.Contains(t, h.parked()[0], "bad ")
			})
		}
	}
}

// Property: see above, for errors whose methods panic.
func TestErrorsThatPanicAreGuarded(t *testing.T) {
	t.Parallel()
	for _, method := range []string{"Error", "Unwrap", "Is"} {
		h := newHarness(t, 1)
		h.produce("1", "bad", "2")
		handler := failingWith(panickingError{method}, &atomic.Bool{})
		h.untilHandled(3, h.run(handler, func(c *consumer.Config) { c.AttemptsMax = 2 }))
		require.Equal(t, []string{"1", "2"}, h.values())
		require.Equal(t, []string{"bad failed parked"}, h.parked())
		require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE error LIKE '%in '||$1||'%'`, method))
	}
}

// Property: a hook that panics, ends its goroutine or does not return causes a log line and affects
// no message: with one goroutine for each partition, and with workers.
func TestHooksAreGuarded(t *testing.T) {
	t.Parallel()
	forever := make(chan struct{})
	t.Cleanup(func() { close(forever) })
	for how, tc := range map[string]struct {
		broken func()
		says   string
	}{
		"panic": {func() { panic("boom") }, "boom"}, "goexit": {runtime.Goexit, "Goexit"}, "hang": {func() { <-forever }, "did not return"},
	} {
		for _, order := range []consumer.Order{consumer.OrderByPartition, consumer.OrderByKey, consumer.OrderUnordered} {
			t.Run(fmt.Sprint(how, order), func(t *testing.T) {
				t.Parallel()
				if how == "hang" {
					longtest.Only(t, "limits of real seconds")
				}
				h := newHarness(t, 1)
				h.produceKeyed("a:1", "b:bad", "c:1")
				var hooks atomic.Int64
				stop := h.run(failingWith(errBad, &atomic.Bool{}), func(c *consumer.Config) {
					c.Order, c.AttemptsMax, c.AbandonedMax = order, 2, 100
					c.Hooks.Processed = func(consumer.Processed) { hooks.Add(1); tc.broken() }
					c.Hooks.Failed = func(consumer.Failed) { hooks.Add(1); tc.broken() }
					c.Hooks.Parked = func(consumer.Parked) { hooks.Add(1); tc.broken() }
				})
				h.waitHandled(3)
				h.produceKeyed("d:1")
				h.untilHandled(4, stop)
				require.Len(t, h.values(), 3)
				require.Len(t, h.parked(), 1)
				if how == "hang" { // no other is called meanwhile
					require.GreaterOrEqual(t, hooks.Load(), int64(1))
				} else {
					require.GreaterOrEqual(t, hooks.Load(), int64(4))
				}
				require.Contains(t, h.log.String(), tc.says)
			})
		}
	}
}

// Property: if a handler returns while a goroutine of its own still runs a statement, its message
// is parked for that, and neither the process nor the pool is harmed: the connection is not used by
// two goroutines.
func TestStatementThatOutlivesItsHandlerIsFound(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	var late sync.WaitGroup
	h.produce("1", "bad", "2")
	pool := h.poolWith(four)
	h.untilHandled(3, h.runOn(pool, consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if string(msg.Value) != "bad" {
			return effect(ctx, tx, msg)
		}
		pid := int64(tx.Conn().PgConn().PID())
		late.Go(func() { _, _ = tx.Exec(context.WithoutCancel(ctx), `SELECT pg_sleep(60)`) })
		for asleep := false; !asleep; {
			if err := h.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'PgSleep')`, pid).Scan(&asleep); err != nil {
				return err
			}
		}
		return nil
	}), nil))
	late.Wait()
	require.Equal(t, []string{"1", "2"}, h.values())
	require.Equal(t, []string{"bad permanent parked"}, h.parked())
	pgtest.Unused(t, pool)
}
