package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: replicas that complete concurrently finish the flows that clients gave up, each once,
// from its recovery point, and do not touch flows without a stored request, postponed flows, and
// flows that a worker holds.
func TestCompleterFinishesWhatWasGivenUp(t *testing.T) {
	t.Parallel()
	pool, b := newPool(t), newBank(t)
	op := newOperation(t, pool, idempotency.Config{})
	cfg := idempotency.FlowConfig[payment]{StoreRequest: true, RetryAfter: time.Millisecond}
	flow := newFlow(t, op, cfg, paymentPhases(b.URL, false))
	const n = 20
	b.refuse = n + 1
	for i := range n {
		_, err := flow.Do(t.Context(), key(fmt.Sprint("k", i)), []byte("100"))
		require.ErrorIs(t, err, errAway)
	}
	forClient := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, paymentPhases(b.URL, false))
	_, err := forClient.Do(t.Context(), key("client"), nil)
	require.ErrorIs(t, err, errAway)
	_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET retry_at = clock_timestamp() + interval '1 hour' WHERE key = 'k0';
		UPDATE effectonce.idempotency_keys SET locked_until = clock_timestamp() + interval '1 hour' WHERE key = 'k1'`)
	require.NoError(t, err)
	finished := 0
	var mu sync.Mutex
	require.Eventually(t, func() bool {
		var group sync.WaitGroup
		for range 4 {
			group.Go(func() {
				done, err := flow.Complete(t.Context())
				assert.NoError(t, err)
				mu.Lock()
				defer mu.Unlock()
				finished += done
			})
		}
		group.Wait()
		return finished >= n-2
	}, 2*time.Minute, 10*time.Millisecond)
	require.Equal(t, n-2, finished)
	_, charges := b.counts()
	require.Equal(t, n-2, charges)
	require.Equal(t, 3*(n-2)+3, count(t, pool, `SELECT count(*) FROM effects`))
	require.Equal(t, n-2, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'finished' AND request IS NULL AND data IS NULL`))
	for name, value := range map[string]string{"100": "k5", "": "client"} {
		k := idempotency.Key{Scope: "tenant", Operation: "order", Value: value}
		require.Equal(t, name, b.charges[k.ChildID("charge").String()])
	}
}

// Property: a flow that fails repeatedly is abandoned when its attempts are used up, and not
// retried; its effects so far stay.
func TestAttemptsAreBounded(t *testing.T) {
	t.Parallel()
	pool, b := newPool(t), newBank(t)
	b.refuse = 1000
	op := newOperation(t, pool, idempotency.Config{AttemptsMax: 4})
	flow := newFlow(t, op, idempotency.FlowConfig[payment]{StoreRequest: true, RetryAfter: time.Millisecond}, paymentPhases(b.URL, false))
	_, err := flow.Do(t.Context(), key("k"), nil)
	require.ErrorIs(t, err, errAway)
	require.Eventually(t, func() bool {
		_, err := flow.Complete(t.Context())
		return errors.Is(err, idempotency.ErrAbandoned)
	}, 2*time.Minute, 10*time.Millisecond)
	asked, _ := b.counts()
	require.Equal(t, 4, asked)
	_, err = flow.Complete(t.Context())
	require.NoError(t, err)
	_, err = flow.Do(t.Context(), key("k"), nil)
	require.ErrorIs(t, err, idempotency.ErrAbandoned)
	_, err = op.Once(t.Context(), key("k"), insertOnce("k"))
	require.ErrorIs(t, err, idempotency.ErrAbandoned)
	require.Equal(t, 1, effects(t, pool, "reserve k"))
	require.Equal(t, 1, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'abandoned' AND error LIKE '%bank is away%; then: its attempts are used up'`))
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
	_, err = short.Once(t.Context(), key("a"), insertOnce("a"))
	require.NoError(t, err)
	_, err = forever.Once(t.Context(), key("a"), insertOnce("a"))
	require.NoError(t, err)
	b.refuse = 1
	flow := newFlow(t, short, idempotency.FlowConfig[payment]{}, paymentPhases(b.URL, false))
	_, err = flow.Do(t.Context(), key("unfinished"), nil)
	require.Error(t, err)
	reaped, err := short.Reap(t.Context())
	require.NoError(t, err)
	require.Zero(t, reaped)
	_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET created_at = created_at - interval '1 year', finished_at = finished_at - interval '1 year', expires_at = expires_at - interval '61 seconds'`)
	require.NoError(t, err)
	reaped, err = forever.Reap(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 1, reaped)
	require.Equal(t, 2, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys`))
	response, err := short.Once(t.Context(), key("a"), insertOnce("a"))
	require.NoError(t, err)
	require.False(t, response.Replayed, "it was forgotten, so it is executed again")
}

// Property: Run does all of that, on several replicas at once, until its context ends.
func TestRunLooksAfterKeys(t *testing.T) {
	t.Parallel()
	pool, b := newPool(t), newBank(t)
	op := newOperation(t, pool, idempotency.Config{})
	cfg := idempotency.FlowConfig[payment]{
		StoreRequest: true, RetryAfter: time.Millisecond, Every: 10 * time.Millisecond,
		Reconcile: func(context.Context, idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
			return idempotency.DidNotHappen(), nil
		},
	}
	flow := newFlow(t, op, cfg, paymentPhases(b.URL, true))
	b.refuse = 1
	_, err := flow.Do(t.Context(), key("k"), nil)
	require.ErrorIs(t, err, errAway)
	_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET state = 'indeterminate', calling = 'charge'`)
	require.NoError(t, err)
	_, err = op.Once(t.Context(), key("old"), insertOnce("old"))
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET expires_at = clock_timestamp() WHERE key = 'old'`)
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	var group sync.WaitGroup
	for range 3 {
		group.Go(func() { flow.Run(ctx) })
	}
	require.Eventually(t, func() bool {
		return count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE key = 'k' AND state = 'finished'`) == 1 &&
			count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys`) == 1
	}, 2*time.Minute, 10*time.Millisecond)
	stop()
	group.Wait()
	requirePaidOnce(t, pool, b)
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
		response, err := o.Once(t.Context(), key(at), insertOnce(at))
		require.NoError(t, err)
		require.False(t, response.Replayed)
		require.Equal(t, 1, effects(t, pool, at))
	}
}

// Property: the wait for a server that does not answer COMMIT is bounded.
func TestCommitThatIsNotAnswered(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	_, err := pool.Exec(t.Context(), `CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(3600); RETURN NULL; END $$;
		CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.name = 'slow') EXECUTE FUNCTION slow()`)
	require.NoError(t, err)
	// The server's statement_timeout does not count while COMMIT runs deferred triggers, or waits
	// for a standby.
	o := newOperation(t, pool, idempotency.Config{StatementTimeout: 3 * time.Second})
	_, err = o.Once(t.Context(), key("slow"), insertOnce("slow"))
	require.ErrorIs(t, err, idempotency.ErrUnanswered)
	_, err = o.Once(t.Context(), key("slow"), insertOnce("slow"))
	require.ErrorIs(t, err, idempotency.ErrInProgress)
	_, err = pool.Exec(t.Context(), `SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = current_database() AND query = 'COMMIT'`)
	require.NoError(t, err)
	require.Zero(t, effects(t, pool, "slow"))
	_, err = o.Once(t.Context(), key("slow"), insertOnce("fast"))
	require.NoError(t, err)
}

// Property: a lock, a window or a pause does not depend on the process's clock: a connection that
// reports other times decides. A lock that has expired by the database is expired, and one that has
// not is not.
func TestTheDatabasesClockDecides(t *testing.T) {
	t.Parallel()
	pool, b := newPool(t), newBank(t)
	op := newOperation(t, pool, idempotency.Config{WaitMax: time.Millisecond, Lock: time.Hour})
	flow := newFlow(t, op, idempotency.FlowConfig[payment]{}, paymentPhases(b.URL, false))
	stuck, release := make(chan struct{}), make(chan struct{})
	ctx := crashpoint.With(t.Context(), func(name string) {
		if name == crashpoint.KeyCalling {
			close(stuck)
			<-release
		}
	})
	done := make(chan error, 1)
	go func() {
		_, err := flow.Do(ctx, key("k"), []byte("100"))
		done <- err
	}()
	<-stuck
	_, err := flow.Do(t.Context(), key("k"), []byte("100"))
	require.ErrorIs(t, err, idempotency.ErrInProgress)
	_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET locked_until = clock_timestamp() - interval '1 microsecond'`)
	require.NoError(t, err)
	requirePaidOnce(t, pool, b)
	close(release)
	require.ErrorIs(t, <-done, idempotency.ErrLockLost)
	requirePaidOnce(t, pool, b)
}

// Property: the hook gets the verdict on each request.
func TestHookIsTold(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	var told []idempotency.Verdict
	o := newOperation(t, pool, idempotency.Config{Hooks: idempotency.Hooks{Answered: func(operation string, v idempotency.Verdict) {
		assert.Equal(t, "order", operation)
		told = append(told, v)
	}}})
	for range 2 {
		_, _ = o.Once(t.Context(), key("a"), insertOnce("a"))
	}
	other := key("a")
	other.Fingerprint[0]++
	_, _ = o.Once(t.Context(), other, insertOnce("a"))
	_, _ = o.Once(t.Context(), key(""), insertOnce("a"))
	_, _ = o.Once(t.Context(), key("b"), func(context.Context, pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{}, errors.New("away")
	})
	require.Equal(t, []idempotency.Verdict{idempotency.Executed, idempotency.Replayed, idempotency.Mismatch, idempotency.InvalidKey, idempotency.FailedForNow}, told)
}

// Property: wrong settings are refused at the start, all at once.
func TestWrongSettings(t *testing.T) {
	t.Parallel()
	_, err := idempotency.New(nil, idempotency.Config{
		Schema: "Bad Name", Window: time.Second, Lock: time.Millisecond, WaitMax: time.Hour, Retries: -1, ResponseBytesMax: -1, AttemptsMax: -1, Isolation: "snapshot", KeyWaitersMax: -1, ScopeWaitersMax: 1_000_000, ScopeKeysMax: -1,
	})
	for _, field := range []string{"pool is nil", "Bad Name", "Operation", "Window 1s", "Lock 1ms", "WaitMax 1h0m0s", "Retries -1", "ResponseBytesMax -1", "AttemptsMax -1", "Isolation snapshot", "KeyWaitersMax -1", "ScopeWaitersMax 1000000", "ScopeKeysMax -1"} {
		require.ErrorContains(t, err, field)
	}
	_, err = idempotency.New(&pgxpool.Pool{}, idempotency.Config{Operation: "a", Forever: true, Window: time.Hour, Strict: true, AttemptsMax: 3})
	require.ErrorContains(t, err, "Forever")
	require.ErrorContains(t, err, "Strict")
	_, err = idempotency.NewFlow(nil, idempotency.FlowConfig[payment]{CallMax: -1}, idempotency.Phase[payment]{}, idempotency.Phase[payment]{Name: "a", AtMostOnce: true}, idempotency.Phase[payment]{Name: "a"})
	for _, problem := range []string{"operation is nil", "name of phase 0", "listed twice", "does nothing", "CallMax"} {
		require.ErrorContains(t, err, problem)
	}
}

// Property: outcomes, recovery points and the record of a call that must not be repeated are
// durable before they are acted on, also if the role's synchronous_commit is off.
func TestWhatIsActedOnIsDurable(t *testing.T) {
	t.Parallel()
	wide, b := newPool(t), newBank(t)
	_, err := wide.Exec(t.Context(), `CREATE FUNCTION durable() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		IF current_setting('synchronous_commit') <> 'on' AND (NEW.state = 'finished' OR NEW.calling IS NOT NULL OR NEW.phases <> OLD.phases) THEN
			RAISE EXCEPTION 'not durable: % % %', NEW.state, NEW.calling, NEW.phases; END IF;
		RETURN NEW; END $$;
		CREATE TRIGGER durable BEFORE UPDATE ON effectonce.idempotency_keys FOR EACH ROW EXECUTE FUNCTION durable()`)
	require.NoError(t, err)
	config := wide.Config()
	config.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
	pool := pgtest.PoolOf(t, config)
	op := newOperation(t, pool, idempotency.Config{})
	_, err = op.Once(t.Context(), key("once"), insertOnce("once"))
	require.NoError(t, err)
	cfg := idempotency.FlowConfig[payment]{Reconcile: func(context.Context, idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
		return idempotency.Happened(idempotency.Response{Status: 200}), nil
	}}
	phases := paymentPhases(b.URL, true)
	_, err = newFlow(t, newOperation(t, pool, idempotency.Config{}), cfg, phases).Do(t.Context(), key("flow"), nil)
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
	decided, err := newFlow(t, newOperation(t, pool, idempotency.Config{}), cfg, phases).Reconcile(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, decided)
	require.Equal(t, 4, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'finished'`))
}
