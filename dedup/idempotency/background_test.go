package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// Property: a flow that fails is tried for GiveUpAfter since its last phase, however often, and then
// abandoned, unless a call may have been made; its effects so far stay. A person gives it as long again.
func TestFlowsAreGivenUpByAge(t *testing.T) {
	t.Parallel()
	pool, away := newPool(t), true
	op := newOperation(t, pool, idempotency.Config{})
	flow := newFlow(t, op, idempotency.FlowConfig[payment]{StoreRequest: true, RetryAfter: time.Millisecond, GiveUpAfter: 10 * time.Hour}, []idempotency.Phase[payment]{
		{Name: "reserve", Write: func(ctx context.Context, tx pgx.Tx, s *step) error { return effect(ctx, tx, "reserve "+s.Key.Value) }},
		{Name: "stock", Write: func(context.Context, pgx.Tx, *step) error {
			if away {
				return errAway
			}
			return nil
		}},
		ends("ship"),
	})
	for range 30 {
		_, err := flow.Do(t.Context(), key("k"), nil)
		require.Error(t, err)
		passes(t, pool, 18*time.Minute)
	}
	abandons := func() {
		passes(t, pool, 11*time.Hour)
		_, err := flow.Complete(t.Context())
		require.ErrorIs(t, err, idempotency.ErrAbandoned)
		do(t, flow, "k", idempotency.ErrAbandoned)
	}
	abandons()
	require.Equal(t, 1, effects(t, pool, "reserve k"))
	require.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'abandoned' AND error LIKE 'phase "stock"%away; then: phase "stock" was not done within%'`))
	_, err := pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET state = 'running', phase_since = clock_timestamp()`) // as a person does
	require.NoError(t, err)
	do(t, flow, "k", errAway)
	abandons()
	asked := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{GiveUpAfter: 10 * time.Hour}, []idempotency.Phase[payment]{
		calls(false, func(*step) error { return errSilent }), ends("ship"),
	})
	for range 2 { // the age of the call counts
		do(t, asked, "asked", errSilent)
		passes(t, pool, 9*time.Hour)
	}
	once := flowOf(t, pool, calls(true, func(*step) error { return nil }), ends("ship"))
	_, err = once.Do(t.Context(), key("asked"), nil)
	require.ErrorIs(t, err, idempotency.ErrIndeterminate, "a later release must not repeat the call")
}

// Property: the completer waits after a failure for as long as the flow was tried since its last phase: at least
// RetryAfter, at most a hundred times that.
func TestPauseGrowsWithTheAge(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{StoreRequest: true, RetryAfter: time.Minute}, []idempotency.Phase[payment]{
		nothing("reserve"),
		{Name: "stock", Write: func(context.Context, pgx.Tx, *step) error { return errAway }},
		ends("ship"),
	})
	for _, c := range [][2]time.Duration{{0, time.Minute}, {10 * time.Minute, 10 * time.Minute}, {10 * time.Hour, 100 * time.Minute}} {
		passes(t, pool, c[0])
		do(t, flow, "k", errAway)
		pause := pgtest.Value[float64](t, pool, `SELECT extract(epoch FROM retry_at - clock_timestamp())::float8 FROM effectonce.idempotency_keys`)
		require.InDelta(t, c[1].Seconds(), pause, 50)
	}
}

// reap forgets what is over.
func reap(t *testing.T, pool *pgxpool.Pool) idempotency.Reaped {
	t.Helper()
	reaped, err := idempotency.Reap(t.Context(), pool, "")
	require.NoError(t, err)
	return reaped
}

// Property: finished keys are forgotten when their window is over by the database's clock, of all
// operations and by any replica; unfinished ones, and those that are remembered forever, never. Row
// H16 of guarantees.md.
func TestReaperForgetsOnlyWhatIsOver(t *testing.T) {
	t.Parallel()
	pool, b := newPool(t), newBank(t)
	short := newOperation(t, pool, idempotency.Config{Window: time.Minute})
	forever, err := idempotency.New(pool, idempotency.Config{Operation: "ledger", Forever: true})
	require.NoError(t, err)
	insert(t, short, "a")
	insert(t, forever, "a")
	b.refuse = 1
	flow := newFlow(t, short, idempotency.FlowConfig[payment]{}, paymentPhases(b.URL, false))
	_, err = flow.Do(t.Context(), key("unfinished"), nil)
	require.Error(t, err)
	require.Zero(t, reap(t, pool))
	_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET created_at = created_at - interval '1 year', finished_at = finished_at - interval '1 year', expires_at = expires_at - interval '61 seconds'`)
	require.NoError(t, err)
	require.Equal(t, idempotency.Reaped{Forgotten: 1, Doubted: 1}, reap(t, pool))
	require.Equal(t, 2, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys`))
	require.False(t, insert(t, short, "a").Replayed, "it was forgotten, so it is executed again")
	forgotten, err := forever.ForgetScope(t.Context(), key("a").Scope)
	require.NoError(t, err)
	require.EqualValues(t, 2, forgotten, "of both operations, and no unfinished one")
	require.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys`))
}

// Property: an unfinished flow whose request is not stored is forgotten with the window if nothing of it
// happened, and left to a person if something did, or may have; polls read none of them. One whose
// request is stored stays. Row H16.
func TestFlowsThatNothingCanFinish(t *testing.T) {
	t.Parallel()
	pool, failure := newPool(t), errAway
	cfg := idempotency.FlowConfig[payment]{}
	do := func(value string, phases ...idempotency.Phase[payment]) {
		_, err := newFlow(t, newOperation(t, pool, idempotency.Config{}), cfg, phases).Do(t.Context(), key(value), nil)
		require.Error(t, err)
	}
	fails := idempotency.Phase[payment]{Name: "fails", Write: func(context.Context, pgx.Tx, *step) error { return failure }}
	done := nothing("done")
	do("nothing", fails, ends("ship"))
	do("called", calls(false, func(*step) error { return errSilent }), ends("ship"))
	do("begun", done, fails, ends("ship"))
	cfg.StoreRequest = true
	do("stored", fails, ends("ship"))
	cfg.StoreRequest = false
	do("locked", fails, ends("ship"))
	_, err := pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET expires_at = expires_at - interval '25 hours', locked_until = CASE key WHEN 'locked' THEN clock_timestamp() + interval '1 hour' END`)
	require.NoError(t, err)
	require.Equal(t, idempotency.Reaped{Forgotten: 1, Doubted: 2}, reap(t, pool))
	for value, state := range map[string]string{"nothing": "missing", "called": "abandoned", "begun": "abandoned", "stored": "running", "locked": "running"} {
		require.Equal(t, state, stateOf(t, pool, value), value)
	}
}

// Property: a connection that breaks at any moment, COMMIT included, leaves one effect: a retry
// under the same key resolves the outcome. A missing answer is reported as such.
func TestBrokenConnectionLeavesOneEffect(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{})
	for _, at := range []string{crashpoint.KeyClaimed, crashpoint.KeyWorked, crashpoint.KeyCommitting} {
		ctx := crashpoint.With(t.Context(), func(name string) {
			if name == at {
				_, err := pool.Exec(t.Context(), `SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'`)
				assert.NoError(t, err)
			}
		})
		_, err := o.Once(ctx, key(at), insertOnce(at))
		require.Error(t, err, at)
		require.Equal(t, at != crashpoint.KeyClaimed, errors.Is(err, idempotency.ErrUnanswered), "%s: %v", at, err)
		require.False(t, insert(t, o, at).Replayed)
		require.Equal(t, 1, effects(t, pool, at))
	}
}

// Property: the wait for a server that does not answer COMMIT is bounded.
func TestCommitThatIsNotAnswered(t *testing.T) {
	longtest.Only(t, "a limit of three seconds")
	t.Parallel()
	pool := newPool(t)
	pgtest.Exec(t, pool, `CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(3600); RETURN NULL; END $$;
		CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.name = 'slow') EXECUTE FUNCTION slow()`)
	// The server's statement_timeout does not count while COMMIT runs deferred triggers, or waits
	// for a standby.
	o := newOperation(t, pool, idempotency.Config{StatementTimeout: 3 * time.Second})
	once(t, o, "slow", idempotency.ErrUnanswered, insertOnce("slow"))
	once(t, o, "slow", idempotency.ErrInProgress, insertOnce("slow"))
	pgtest.Exec(t, pool, `SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = current_database() AND query = 'COMMIT'`)
	require.Zero(t, effects(t, pool, "slow"))
	once(t, o, "slow", nil, insertOnce("fast"))
}

// Property: outcomes, recovery points and the record of a call that must not be repeated are
// durable before they are acted on, also if the role's synchronous_commit is off, or the work's own.
func TestWhatIsActedOnIsDurable(t *testing.T) {
	t.Parallel()
	wide, b := newPool(t), newBank(t)
	pgtest.Exec(t, wide, `CREATE FUNCTION durable() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		IF current_setting('synchronous_commit') <> 'on' AND (NEW.state = 'finished' OR NEW.calling IS NOT NULL AND (NEW.calling, NEW.call) IS DISTINCT FROM (OLD.calling, OLD.call) OR NEW.phases <> OLD.phases) THEN
			RAISE EXCEPTION 'not durable: % % %', NEW.state, NEW.calling, NEW.phases; END IF;
		RETURN NEW; END $$;
		CREATE TRIGGER durable BEFORE UPDATE ON effectonce.idempotency_keys FOR EACH ROW EXECUTE FUNCTION durable()`)
	config := wide.Config()
	config.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
	pool := pgtest.PoolOf(t, config)
	op := newOperation(t, pool, idempotency.Config{})
	insert(t, op, "once")
	once(t, op, "set", nil, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		_, err := tx.Exec(ctx, `SET LOCAL synchronous_commit = off`)
		return idempotency.Response{Status: 201}, err
	})
	cfg := idempotency.FlowConfig[payment]{Reconcile: func(_ context.Context, u idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
		return u.Continue(u.State), nil
	}}
	phases := paymentPhases(b.URL, true)
	_, err := newFlow(t, newOperation(t, pool, idempotency.Config{}), cfg, phases).Do(t.Context(), key("flow"), nil)
	require.NoError(t, err)
	for value, failure := range map[string]error{
		"declined": idempotency.Final(idempotency.Response{Status: 402}, errors.New("declined")),
		"unknown":  errors.New("no answer"),
	} {
		phases[1].Call = func(context.Context, *idempotency.Step[payment]) error { return failure }
		_, err = newFlow(t, newOperation(t, pool, idempotency.Config{}), cfg, phases).Do(t.Context(), key(value), nil)
		require.Equal(t, value == "unknown", errors.Is(err, idempotency.ErrIndeterminate), err)
	}
	passes(t, wide, time.Minute)
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), cfg, phases)
	reconciles(t, flow, 1)
	do(t, flow, "unknown", nil)
	require.Equal(t, 5, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'finished'`))
}

// Property: replicas that complete concurrently finish the flows that clients gave up, each once,
// from its recovery point, and do not touch flows without a stored request, postponed flows, and
// flows that a worker holds.
func TestCompleterFinishesWhatWasGivenUp(t *testing.T) {
	t.Parallel()
	pool, b := newPool(t), newBank(t)
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{StoreRequest: true, RetryAfter: time.Second}, paymentPhases(b.URL, false))
	forClient := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, paymentPhases(b.URL, false))
	const n = 20
	b.refuse = n + 1
	for i := range n {
		_, err := flow.Do(t.Context(), key(fmt.Sprint("k", i)), []byte("100"))
		require.ErrorIs(t, err, errAway)
	}
	do(t, forClient, "client", errAway)
	passes(t, pool, time.Minute)
	pgtest.Exec(t, pool, `UPDATE effectonce.idempotency_keys SET retry_at = clock_timestamp() + interval '1 hour' WHERE key = 'k0';
		UPDATE effectonce.idempotency_keys SET locked_until = clock_timestamp() + interval '1 hour' WHERE key = 'k1'`)
	taking := holding(t, pool) // another worker takes a key at the same time, which is no failure
	_, err := taking.Exec(t.Context(), `SELECT FROM effectonce.idempotency_keys WHERE key = 'k2' FOR UPDATE`)
	require.NoError(t, err)
	done, err := flow.Complete(t.Context())
	require.NoError(t, errors.Join(err, taking.Rollback(t.Context())))
	var finished atomic.Int64
	finished.Add(int64(done))
	testwait.True(t, "all are finished", func() bool {
		var group sync.WaitGroup
		for range 4 {
			group.Go(func() {
				done, err := flow.Complete(t.Context())
				assert.NoError(t, err) //nolint:testifylint // not in the goroutine of the test
				finished.Add(int64(done))
			})
		}
		group.Wait()
		return finished.Load() >= n-2
	})
	require.EqualValues(t, n-2, finished.Load())
	_, charges := b.counts()
	require.Equal(t, n-2, charges)
	require.Equal(t, 3*(n-2)+3, pgtest.Count(t, pool, `SELECT count(*) FROM effects`))
	require.Equal(t, n-2, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'finished' AND request IS NULL AND data IS NULL`))
	require.Equal(t, "100", b.charges[idempotency.Key{Scope: "tenant", Operation: "order", Value: "k5"}.ChildID("charge").String()])
}

// Property: wrong settings, and those that contradict each other, are refused at the start, all at
// once, and an ID that other requests would share is not made.
func TestWrongSettings(t *testing.T) {
	t.Parallel()
	_, err := idempotency.New(nil, idempotency.Config{
		Schema: "Bad Name", Window: time.Second, Lock: time.Millisecond, WaitMax: time.Hour, ResponseBytesMax: -1, Isolation: "snapshot",
	})
	for _, field := range []string{"pool is nil", "Bad Name", "Operation", "Window 1s", "Lock 1ms", "WaitMax 1h0m0s", "ResponseBytesMax -1", "Isolation snapshot"} {
		require.ErrorContains(t, err, field)
	}
	pool := pgtest.NoPool(t)
	_, err = idempotency.New(pool, idempotency.Config{Operation: "a", Forever: true, Window: time.Hour})
	require.ErrorContains(t, err, "Forever")
	_, err = idempotency.NewFlow(nil, idempotency.FlowConfig[payment]{CallMax: -1}, idempotency.Phase[payment]{}, idempotency.Phase[payment]{Name: "a", AtMostOnce: true}, idempotency.Phase[payment]{Name: "a"})
	for _, problem := range []string{"operation is nil", "name of phase 0", "listed twice", "does nothing", "CallMax"} {
		require.ErrorContains(t, err, problem)
	}
	type flow = idempotency.FlowConfig[payment]
	for want, c := range map[string]struct {
		op    idempotency.Config
		cfg   flow
		phase idempotency.Phase[payment]
	}{
		`GiveUpAfter 30s: want 1m0s to 87600h0m0s`:    {cfg: flow{GiveUpAfter: 30 * time.Second}, phase: ends("charge")},
		`GiveUpAfter 2m0s: want 1h0m0s to 87600h0m0s`: {cfg: flow{CallMax: time.Hour, GiveUpAfter: 2 * time.Minute}, phase: ends("charge")},
		`AtOnceMax 1001: want 1 to 1000`:              {cfg: flow{AtOnceMax: 1001}, phase: ends("charge")},
		"Isolation":                                   {op: idempotency.Config{Isolation: pgx.Serializable}, phase: ends("all")},
	} {
		_, err := idempotency.NewFlow(newOperation(t, pool, c.op), c.cfg, c.phase)
		require.ErrorContains(t, err, want)
	}
	_, err = idempotency.NewFlow(newOperation(t, pool, idempotency.Config{}), flow{
		Ledgers: map[string]idempotency.Ledger{"ship": &ledger{}, "charge": nil, "other": &ledger{}},
	}, calls(true, func(*step) error { return nil }), ends("ship"))
	for _, ledger := range []string{`Ledgers "ship"`, `Ledgers "other"`, `Ledgers "charge"`} { // the first makes no call
		require.ErrorContains(t, err, ledger)
	}
	op := newOperation(t, pool, idempotency.Config{})
	newFlow(t, op, flow{}, []idempotency.Phase[payment]{ends("ship")})
	_, err = idempotency.NewFlow(op, flow{}, ends("ship"))
	require.ErrorContains(t, err, `operation "order" has a flow already`)
	require.Panics(t, func() { key("k").ChildID("charge") })
	whole := newOperation(t, pool, idempotency.Config{}).Key("tenant", "k", idempotency.Fingerprint{})
	require.Equal(t, idempotency.Key{Scope: "tenant", Operation: "order", Value: "k"}.ChildID("charge"), whole.ChildID("charge"))
}

// Property: work that closes the engine's guard cannot pass for a success: what it committed by itself is in
// doubt, and nothing of a transaction without the guard is committed.
func TestClosedGuardIsNoSuccess(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{Strict: true})
	do := func(ctx context.Context, tx pgx.Tx, sql string) error {
		_, err := tx.Conn().Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
		return errors.Join(effect(ctx, tx, sql), err)
	}
	once := func(sql string) error {
		_, err := o.Once(t.Context(), key(sql), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			return idempotency.Response{Status: 201}, do(ctx, tx, sql)
		})
		return err
	}
	for range 2 {
		require.ErrorContains(t, once("CLOSE ALL"), "closed its cursors")
	}
	require.Zero(t, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys`)+effects(t, pool, "CLOSE ALL"))
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{{Name: "all", Write: func(ctx context.Context, tx pgx.Tx, s *step) error {
		s.Finish(idempotency.Response{Status: 201})
		return do(ctx, tx, "CLOSE ALL")
	}}})
	_, err := flow.Do(t.Context(), key("flow"), nil)
	require.ErrorContains(t, err, "closed its cursors")
	require.Zero(t, effects(t, pool, "CLOSE ALL"))

	require.ErrorContains(t, once("CLOSE ALL; COMMIT"), "ended its transaction")
	require.ErrorIs(t, once("CLOSE ALL; COMMIT"), idempotency.ErrIndeterminate)
}

// Property: keys that are left to a person do not keep a run from later keys, even if they fill its
// pages, and the log reports that they wait. Row H16 of guarantees.md.
func TestReapGoesOnBehindWhatItLeaves(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	var log bytes.Buffer
	o := newOperation(t, pool, idempotency.Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	pgtest.Exec(t, pool, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, status, expires_at)
		SELECT 't', 'order', n::text, sha256('x'), CASE WHEN n > 1000 THEN 'finished' ELSE 'running' END, CASE WHEN n > 1000 THEN 201 END, clock_timestamp() - interval '1 hour' + n * interval '1 s' FROM generate_series(1, 20000) n;
		UPDATE effectonce.idempotency_keys SET flow = 'f', phases = '{begun}' WHERE key::int <= 1000`)
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	pgtest.Exec(t, conn.Conn(), `UPDATE effectonce.idempotency_keys SET expires_at = clock_timestamp() + interval '1 hour' WHERE key::int > 1010`)
	pgtest.Exec(t, conn.Conn(), `ANALYZE effectonce.idempotency_keys`)
	require.Contains(t, pgtest.Plan(t, conn.Conn(), idempotency.ReapSQL, 1000), `Index Cond: (expires_at <=`, "not all that are within their windows")
	conn.Release()
	require.NoError(t, o.ReapAndLog(t.Context()))
	require.Equal(t, 1000, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'abandoned'`))
	require.Equal(t, 19_990, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys`))
	require.Contains(t, log.String(), "keys need a person")
}

// Property: flows that hang at a foreign system take at most FlowConfig.AtOnceMax slots; whatever
// hangs, another operation's keys are completed, keys in doubt are reconciled, and old keys are
// forgotten. Run ends when its context does: what it drives stops between two phases, with its key
// free. Rows H1, H19 of guarantees.md.
func TestHangingProviderKeepsNothingElse(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var calling, most atomic.Int64
	var away atomic.Bool
	away.Store(true)
	run := func(operation string, hangs bool) (*idempotency.Operation, *idempotency.Flow[payment]) {
		op, err := idempotency.New(pool, idempotency.Config{Operation: operation, Lock: time.Hour})
		require.NoError(t, err)
		return op, newFlow(t, op, idempotency.FlowConfig[payment]{
			StoreRequest: true, RetryAfter: time.Millisecond, Every: 10 * time.Millisecond, CallMax: time.Hour,
			Reconcile: func(_ context.Context, u idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
				return u.Continue(u.State), nil
			},
		}, []idempotency.Phase[payment]{{Name: "charge", Call: func(ctx context.Context, _ *step) error {
			switch {
			case away.Load():
				return errAway
			case hangs:
				now := calling.Add(1)
				defer calling.Add(-1)
				most.Store(max(now, most.Load()))
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		}}, ends("ship")})
	}
	op, flow := run("order", true)
	_, other := run("other", false)
	for _, f := range []*idempotency.Flow[payment]{flow, other} {
		_, err := f.Do(t.Context(), key("k0"), []byte("100"))
		require.ErrorIs(t, err, errAway)
	}
	insert(t, op, "old")
	pgtest.Exec(t, pool, `UPDATE effectonce.idempotency_keys SET expires_at = clock_timestamp() WHERE key = 'old';
		INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, attempts, locked_by, request, flow, sealed)
		SELECT scope, operation, 'k' || n, fingerprint, 'running', 1, locked_by, '100', flow, sealed FROM effectonce.idempotency_keys, generate_series(1, 29) n WHERE key = 'k0' AND operation = 'order';
		INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, locked_by, flow)
		SELECT scope, operation, 'doubt', fingerprint, 'indeterminate', locked_by, flow FROM effectonce.idempotency_keys WHERE key = 'k0' AND operation = 'order'`)
	away.Store(false)
	var group sync.WaitGroup
	group.Go(func() { flow.Run(ctx) })
	testwait.Equal(t, int64(8), "calls hang", func() int64 { return calling.Load() })
	group.Go(func() { other.Run(ctx) })
	for sql, want := range map[string]int{`key = 'k0' AND operation = 'other' AND state = 'finished'`: 1, `key = 'doubt' AND calling = 'charge' AND call = 'happened'`: 1, `key = 'old'`: 0} {
		testwait.Equal(t, want, sql, func() int {
			return pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE `+sql)
		})
	}
	stop()
	group.Wait()
	require.EqualValues(t, 8, most.Load())
	require.Equal(t, 30, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE operation = 'order' AND state = 'running' AND locked_until IS NULL AND call IS DISTINCT FROM 'happened'`))
}

// Property: where the database cannot be reached, all of them say so.
func TestUnreachableDatabaseIsReported(t *testing.T) {
	t.Parallel()
	op := newOperation(t, pgtest.NoPool(t), idempotency.Config{})
	flow := newFlow(t, op, idempotency.FlowConfig[payment]{StoreRequest: true, Reconcile: func(context.Context, idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
		return idempotency.Unknown(), nil
	}}, []idempotency.Phase[payment]{ends("ship")})
	_, reap := idempotency.Reap(t.Context(), pgtest.NoPool(t), "")
	_, once := op.Once(t.Context(), key("01900000-0000-7000-8000-000000000000"), insertOnce("k")) // an old key, which is looked up first
	_, do := flow.Do(t.Context(), key("k"), nil)
	_, complete := flow.Complete(t.Context())
	_, reconcile := flow.Reconcile(t.Context())
	for n, err := range []error{reap, once, do, complete, reconcile} {
		require.Error(t, err, n)
	}
	_, err := newFlow(t, newOperation(t, pgtest.NoPool(t), idempotency.Config{}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{ends("ship")}).Reconcile(t.Context())
	require.ErrorContains(t, err, "FlowConfig.Reconcile is not set")
}

// ledger is what a foreign system says that it did.
type ledger struct {
	acted  []uuid.UUID
	since  time.Time
	during func()
	err    error
}

func (l *ledger) References(_ context.Context, since time.Time) ([]uuid.UUID, error) {
	l.since = since
	if l.during != nil {
		l.during()
	}
	return l.acted, l.err
}

// Property: a comparison reports each call that one side has and the other has not, and nothing else:
// not a call that is under way, nor one that was made after the list was, nor one that is older than it.
func TestCompareFindsWhatDiffers(t *testing.T) {
	t.Parallel()
	pool, said, l := newPool(t), &bytes.Buffer{}, &ledger{}
	child := func(value string) uuid.UUID {
		k := key(value)
		k.Operation = "order"
		return k.ChildID("charge")
	}
	failure := error(nil)
	compared := make(chan map[idempotency.DifferenceKind]int, 9)
	o := newOperation(t, pool, idempotency.Config{Window: 4 * time.Hour, Logger: slog.New(slog.NewTextHandler(said, nil)), Hooks: idempotency.Hooks{
		Compared: func(operation, phase string, differences map[idempotency.DifferenceKind]int) {
			require.Equal(t, []string{"order", "charge"}, []string{operation, phase})
			compared <- differences
		},
	}})
	flow := newFlow(t, o, idempotency.FlowConfig[payment]{Ledgers: map[string]idempotency.Ledger{"charge": l}, Every: 10 * time.Millisecond, CompareEvery: time.Second},
		[]idempotency.Phase[payment]{calls(true, func(*step) error { return failure }), ends("ship")})
	for _, value := range []string{"both", "here", "late", "old", "fresh"} {
		do(t, flow, value, nil)
	}
	failure = errAway
	for _, value := range []string{"doubt", "nowhere"} {
		do(t, flow, value, idempotency.ErrIndeterminate)
	}
	failure = idempotency.NotDone(errAway)
	do(t, flow, "under way", errAway)
	passes(t, pool, time.Hour)
	pgtest.Exec(t, pool, `UPDATE effectonce.idempotency_keys SET finished_at = finished_at - interval '1 hour';
		UPDATE effectonce.idempotency_keys SET created_at = created_at - interval '1 hour' WHERE key = 'old'`)
	stranger := uuid.New()
	l.acted = []uuid.UUID{child("both"), child("both"), child("doubt"), child("under way"), stranger}
	l.during = func() { // its call is made after the list was
		pgtest.Exec(t, pool, `UPDATE effectonce.idempotency_keys SET finished_at = clock_timestamp() WHERE key IN ('late', 'fresh')`)
	}
	found, err := flow.Compare(t.Context(), "charge", l)
	require.NoError(t, err)
	begins := pgtest.Value[time.Time](t, pool, `SELECT clock_timestamp() - interval '2 hours'`) // by the database's clock
	require.WithinDuration(t, begins, l.since, time.Minute, "half of the window")
	kinds := map[uuid.UUID]idempotency.DifferenceKind{}
	for _, d := range found {
		kinds[d.Reference] = d.Kind
		require.Equal(t, d.Kind == idempotency.ActedForNoKey, d.Key.Value == "")
	}
	require.Equal(t, map[uuid.UUID]idempotency.DifferenceKind{
		child("here"): idempotency.DidNotAct, child("doubt"): idempotency.ActedNotDone, stranger: idempotency.ActedForNoKey,
	}, kinds)

	_, err = flow.Compare(t.Context(), "charge", &ledger{err: errors.New("no statement today")})
	require.ErrorContains(t, err, "no statement today")
	_, err = flow.Compare(t.Context(), "ship", l)
	require.ErrorContains(t, err, `"ship" makes no call`)
	for range 150 { // a list of something else: the log stays short
		l.acted = append(l.acted, uuid.New())
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	over := make(chan struct{})
	go func() { defer close(over); flow.Run(ctx) }()
	require.Equal(t, map[idempotency.DifferenceKind]int{idempotency.DidNotAct: 1, idempotency.ActedForNoKey: 151, idempotency.ActedNotDone: 1}, testwait.Chan(t, "the job", compared))
	stop()
	testwait.Chan(t, "the loops end", over)
	require.Contains(t, said.String(), child("here").String())
	require.Equal(t, 100, strings.Count(said.String(), "kind=acted_for_no_key")/(1+len(compared)))
}
