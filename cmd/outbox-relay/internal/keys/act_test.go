package keys_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/keys"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

func unlock(ctx context.Context, db operator.Beginner, place keys.Place) (*keys.Changed, error) {
	return keys.Unlock(ctx, db, schema, ana, place)
}

func retry(ctx context.Context, db operator.Beginner, place keys.Place) (*keys.Changed, error) {
	return keys.Retry(ctx, db, schema, ana, place, keys.CallDidNotHappen)
}

func finish(ctx context.Context, db operator.Beginner, place keys.Place) (*keys.Changed, error) {
	window := time.Hour
	return keys.Finish(ctx, db, schema, ana, place, keys.Outcome{Status: 200, Header: map[string][]string{"X-By": {"ana"}}, Body: []byte("by hand"), Window: &window})
}

// Each action is done in the states where it makes sense, and recorded. In every other state it
// changes nothing, records nothing, and names the remedy. Each action increases the token, so that
// no earlier holder of the key can store anything.
func TestActionsFitTheState(t *testing.T) {
	t.Parallel()
	const done = ""
	acts := map[string]func(context.Context, operator.Beginner, keys.Place) (*keys.Changed, error){"unlock": unlock, "retry": retry, "finish": finish}
	pool := pgtest.Pool(t)
	all := func() string {
		return pgtest.Value[string](t, pool, "SELECT concat((SELECT string_agg(k::text, ' ' ORDER BY key) FROM effectonce.idempotency_keys k), (SELECT count(*) FROM effectonce.operator_actions))")
	}
	for _, c := range []struct{ state, unlock, retry, finish string }{
		{"locked", done, "keys unlock", "keys unlock"},
		{"free", "its lock is free", "its lock is free", done},
		{"put off", "its lock is free", "its lock is free", done},
		{"finished", "never changed", "never changed", "never changed"},
		{"over", "never changed", "never changed", "never changed"},
		{"indeterminate", "keys show", done, done},
		{"abandoned", "keys show", done, done},
		{"work", "keys show", done, done},
	} {
		for what, want := range map[string]string{"unlock": c.unlock, "retry": c.retry, "finish": c.finish} {
			name := what + " " + c.state
			place := key(t, pool, name, c.state)
			key(t, pool, "other than "+name, c.state)
			before := all()
			changed, err := acts[what](t.Context(), pool, place)
			if want != done {
				require.ErrorContains(t, err, want, name)
				var refused *keys.RefusedError
				require.ErrorAs(t, err, &refused)
				assert.Equal(t, before, all(), name)
				continue
			}
			require.NoError(t, err, name)
			assert.Equal(t, int64(7), changed.Was.LockToken)
			if name == "retry work" { // work in one transaction begins from the start
				assert.Nil(t, changed.Now)
				assert.Zero(t, pgtest.Value[int](t, pool, "SELECT count(*) FROM effectonce.idempotency_keys WHERE key = $1", name))
				continue
			}
			now := find(t, pool, name)
			changed.Now.AgeSeconds = now.AgeSeconds
			assert.Equal(t, now, *changed.Now)
			assert.Equal(t, []any{int64(8), false}, []any{now.LockToken, now.Locked}, name)
			assert.Nil(t, now.RetryAt)
			switch what {
			case "finish":
				assert.Equal(t, keys.Finished, now.State)
				assert.NotNil(t, now.RequestBytes, "an operator cannot take it away, nor change it")
				assert.NotNil(t, now.FinishedAt)
			case "retry":
				assert.Equal(t, keys.Running, now.State)
				assert.Zero(t, now.Attempts)
				assert.Nil(t, now.Calling)
			default:
				assert.True(t, now.Stuck)
			}
			assert.Equal(t, int64(7), find(t, pool, "other than "+name).LockToken)
			actions, err := keys.Actions(t.Context(), pool, schema, place, 9)
			require.NoError(t, err)
			require.Len(t, actions, 1)
			assert.Equal(t, []string{"key." + what, "ana@ops", "asked the bank"}, []string{actions[0].What, *actions[0].Stated, actions[0].Why})
			assert.NotContains(t, string(actions[0].Subject), "secret")
			assert.Equal(t, "charge of scope t ("+now.Mark+")", actions[0].Object())
		}
	}
}

// A worker whose lock is ended while it asks a foreign system can store nothing: the next request
// continues from the recovery point, and the outcome is that one's.
func TestUnlockFencesTheHolder(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	pgtest.Exec(t, pool, reservedSQL)
	called, free := make(chan struct{}), make(chan struct{})
	var calls atomic.Int32
	pay := idempotency.Phase[struct{}]{
		Call: func(context.Context, *idempotency.Step[struct{}]) error {
			if calls.Add(1) == 1 {
				close(called)
				<-free
			}
			return nil
		},
	}
	holder, flow := charge(t, pool, idempotency.Config{Lock: time.Hour}, pay), charge(t, pool, idempotency.Config{}, pay) // of two processes
	first := make(chan error, 1)
	go func() {
		_, err := holder.Do(t.Context(), named, nil)
		first <- err
	}()
	testwait.Chan(t, "the call", called)
	_, err := flow.Do(t.Context(), named, nil)
	require.ErrorIs(t, err, idempotency.ErrInProgress)
	changed, err := unlock(t.Context(), pool, find(t, pool, "k").Place)
	require.NoError(t, err)
	assert.True(t, changed.Was.Locked)
	response, err := flow.Do(t.Context(), named, nil)
	require.NoError(t, err)
	assert.False(t, response.Replayed)
	close(free)
	require.ErrorIs(t, testwait.Chan(t, "the first request's end", first), idempotency.ErrLockLost)
	assert.Equal(t, 1, pgtest.Value[int](t, pool, "SELECT count(*) FROM reserved"))
}

// A key whose call may have been made, and must not be made twice, returns to its phases only with
// the statement of a person who knows that the call did nothing, however the key came to wait. Row
// H5.
func TestRetryOfACallNeedsAWord(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for _, state := range []string{"indeterminate", "abandoned"} {
		place := key(t, pool, state, state)
		pgtest.Exec(t, pool, "UPDATE effectonce.idempotency_keys SET calling = 'pay', call = 'once'")
		_, err := keys.Retry(t.Context(), pool, schema, ana, place, keys.CallUnknown)
		require.ErrorContains(t, err, "a person decides", state)
		row := find(t, pool, state)
		assert.Equal(t, state, row.State)
		assert.Equal(t, "pay", *row.Calling)
		assert.Equal(t, int64(7), row.LockToken)
		_, err = keys.Retry(t.Context(), pool, schema, ana, place, keys.CallDidNotHappen)
		require.NoError(t, err)
		assert.Equal(t, keys.Running, find(t, pool, state).State)
		assert.True(t, pgtest.Value[bool](t, pool, "SELECT calling_since IS NULL AND calling IS NULL AND call IS NULL FROM effectonce.idempotency_keys WHERE key = '"+state+"'"), "the age of its call begins anew")
		actions, err := keys.Actions(t.Context(), pool, schema, place, 9)
		require.NoError(t, err)
		require.Len(t, actions, 1, "a refusal is not written down")
		assert.Contains(t, string(actions[0].Subject), `"call_did_not_happen": true`)
	}
	place := key(t, pool, "no call", "abandoned")
	_, err := keys.Retry(t.Context(), pool, schema, ana, place, keys.CallHappened)
	require.ErrorContains(t, err, "a person decides")
	pgtest.Exec(t, pool, "UPDATE effectonce.idempotency_keys SET calling = 'pay', call = 'repeatable', calling_since = created_at WHERE key = 'no call'")
	_, err = keys.Retry(t.Context(), pool, schema, ana, place, keys.CallUnknown)
	require.NoError(t, err)
	assert.True(t, pgtest.Value[bool](t, pool, "SELECT calling_since = created_at AND call = 'repeatable' FROM effectonce.idempotency_keys WHERE key = 'no call'"), "a call that may be repeated may have been made: its age stays")
	place = key(t, pool, "paid", "indeterminate")
	pgtest.Exec(t, pool, "UPDATE effectonce.idempotency_keys SET call = 'repeatable', calling_since = created_at WHERE key = 'paid'") // it is too old to be made again
	_, err = keys.Retry(t.Context(), pool, schema, ana, place, keys.CallUnknown)
	require.ErrorContains(t, err, "a person decides")
	_, err = keys.Retry(t.Context(), pool, schema, ana, place, keys.CallHappened)
	require.NoError(t, err)
	place2 := key(t, pool, "work", "work")
	for _, call := range []keys.Call{keys.CallHappened, keys.CallUnknown} {
		_, err = keys.Retry(t.Context(), pool, schema, ana, place2, call)
		require.ErrorAs(t, err, new(*keys.RefusedError), "it would be executed from the start")
	}
	assert.True(t, pgtest.Value[bool](t, pool, "SELECT calling = 'pay' AND call = 'happened' AND calling_since IS NULL FROM effectonce.idempotency_keys WHERE key = 'paid'"), "its Write comes next")
}

// errLost is a foreign system that does not answer.
var errLost = errors.New("no answer")

// undecided leaves key k behind in doubt.
func undecided(t *testing.T, flow *idempotency.Flow[struct{}]) {
	t.Helper()
	_, err := flow.Do(t.Context(), named, []byte("1 EUR"))
	require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	_, err = flow.Do(t.Context(), named, []byte("1 EUR"))
	require.ErrorIs(t, err, idempotency.ErrIndeterminate)
}

// A request that did not happen continues from its recovery point. One that happened is answered
// with the operator's outcome, and nothing is asked again, also where outcomes are sealed. Row H5 of
// guarantees.md.
func TestInDoubtItIsThePersonWhoDecides(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	pgtest.Exec(t, pool, reservedSQL)
	var calls atomic.Int32
	var asked atomic.Value
	pay := idempotency.Phase[struct{}]{
		AtMostOnce: true,
		Call: func(_ context.Context, step *idempotency.Step[struct{}]) error {
			asked.Store(step.ChildID())
			if calls.Add(1) <= 2 {
				return errLost
			}
			return nil
		},
	}
	flow := charge(t, pool, idempotency.Config{Seal: reverse{}}, pay)
	undecided(t, flow)
	row := find(t, pool, "k")
	assert.Equal(t, []string{"reserve"}, row.Phases)
	assert.Equal(t, "pay", *row.Calling)
	assert.Equal(t, asked.Load(), row.ChildID("pay"), "what the person asks the foreign system for")
	_, err := retry(t.Context(), pool, row.Place)
	require.NoError(t, err)
	undecided(t, flow)
	_, err = finish(t.Context(), pool, row.Place)
	require.NoError(t, err)
	response, err := flow.Do(t.Context(), named, nil)
	require.NoError(t, err)
	assert.Equal(t, idempotency.Response{Status: 200, Header: map[string][]string{"X-By": {"ana"}}, Body: []byte("by hand"), Replayed: true}, response)
	assert.Equal(t, int32(2), calls.Load())
	assert.Equal(t, 1, pgtest.Value[int](t, pool, "SELECT count(*) FROM reserved"))
}

// reverse is a Sealer that can be seen through.
type reverse struct{}

func (reverse) MAC(text, _ []byte) ([]byte, error)   { return append([]byte("mac:"), text...), nil }
func (reverse) Seal(plain, _ []byte) ([]byte, error) { return append([]byte("sealed:"), plain...), nil }

func (reverse) Open(sealed, _ []byte) ([]byte, error) {
	if len(sealed) < 7 || string(sealed[:7]) != "sealed:" {
		return nil, errors.New("not sealed")
	}
	return sealed[7:], nil
}

// If a worker commits its outcome while an operator ends its lock, the operator waits for it, and
// the worker wins.
func TestAnOutcomeUnderWayIsWaitedFor(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	place := key(t, pool, "k", "locked")
	worker, err := pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = worker.Exec(t.Context(), "SELECT effectonce.finish_key('t', 'charge', 'k', 7, 'pay', 201, NULL, 'paid', false, interval '1 day')")
	require.NoError(t, err)
	conn, err := pgx.ConnectConfig(t.Context(), pool.Config().ConnConfig)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.PgConn().Conn().Close() })
	refused := make(chan error, 1)
	go func() {
		_, err := unlock(t.Context(), conn, place)
		refused <- err
	}()
	testwait.True(t, "the operator waits", func() bool {
		return pgtest.Value[bool](t, pool, "SELECT cardinality(pg_blocking_pids($1)) > 0", conn.PgConn().PID())
	})
	require.NoError(t, worker.Commit(t.Context()))
	require.ErrorContains(t, testwait.Chan(t, "the refusal", refused), "never changed")
	assert.Equal(t, keys.Finished, find(t, pool, "k").State)
	_, err = unlock(t.Context(), conn, keys.Place{Scope: "t", Operation: "charge", Key: "nobody's"})
	require.ErrorIs(t, err, keys.ErrNotFound)
}

// Finished keys are forgotten when their window is over, in small transactions; everything else
// stays.
func TestReapForgetsWhatIsOver(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for _, state := range []string{"locked", "free", "put off", "finished", "over", "work", "indeterminate", "abandoned"} {
		key(t, pool, state, state)
	}
	pgtest.Exec(t, pool, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, status, expires_at)
		SELECT 't', 'many', n::text, sha256('x'), 'finished', 201, CASE WHEN n <= 2500 THEN clock_timestamp() END FROM generate_series(1, 2510) n`)
	pgtest.Exec(t, pool, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, flow, phases, expires_at)
		SELECT 't', 'flow', n::text, sha256('x'), 'running', 'f', CASE WHEN n > 5 THEN '{begun}' ELSE '{}' END::text[], clock_timestamp() - interval '1 hour' FROM generate_series(1, 9) n`)
	reaped, err := idempotency.Reap(t.Context(), pool, schema)
	require.NoError(t, err)
	assert.Equal(t, idempotency.Reaped{Forgotten: 2506, Doubted: 4}, reaped)
	assert.Equal(t, 7, pgtest.Value[int](t, pool, "SELECT count(*) FROM effectonce.idempotency_keys WHERE operation = 'charge'"))
	assert.Equal(t, 4, pgtest.Value[int](t, pool, "SELECT count(*) FROM effectonce.idempotency_keys WHERE operation = 'flow' AND state = 'abandoned'"), "something of them happened")
	assert.Equal(t, 10, pgtest.Value[int](t, pool, "SELECT count(*) FROM effectonce.idempotency_keys WHERE operation = 'many'"), "kept for ever")
}

// Property: keys are retried together only as each could be alone, of one operation, and once each: what
// came in doubt again, changed, or may be on its way, is left alone, with the reason.
func TestRetryAll(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	pgtest.Exec(t, pool, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, phases, flow, calling, call, lock_token, created_at)
		SELECT 't', 'charge', n::text, sha256('x'), CASE WHEN n % 2 = 0 THEN 'abandoned' ELSE 'indeterminate' END, '{}', 'charge', CASE WHEN n % 2 = 1 THEN 'pay' END, CASE WHEN n % 2 = 1 THEN 'once' END, 7, clock_timestamp() - n * interval '1 s'
		FROM generate_series(1, 1202) n`)
	pgtest.Exec(t, pool, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, flow) VALUES ('t', 'other', 'not meant', sha256('x'), 'abandoned', 'f')`)
	pgtest.Exec(t, pool, `UPDATE effectonce.idempotency_keys SET retry_at = clock_timestamp() + interval '1 minute' WHERE key = '3'`)
	operation := "charge"
	all := func(call keys.Call, progress func(int)) *keys.Report {
		report, err := keys.RetryAll(t.Context(), pool, schema, ana, keys.Filter{Operation: &operation, States: []string{keys.Indeterminate, keys.Abandoned}}, call, progress)
		require.NoError(t, err)
		return report
	}
	pgtest.Exec(t, pool, `UPDATE effectonce.idempotency_keys SET calling = NULL, call = NULL WHERE key = '7'`) // its program says so
	report := all(keys.CallUnknown, func(int) {})
	assert.Equal(t, 601, report.Done)
	require.Len(t, report.Left, 601)
	assert.Contains(t, report.Left[0].Why, "a person decides")
	assert.Contains(t, report.Left[3].Why, "a person decides")
	pgtest.Exec(t, pool, `UPDATE effectonce.idempotency_keys SET calling = 'pay', call = 'once' WHERE key = '7'`)
	report = all(keys.CallHappened, func(done int) {
		if done == 1 {
			pgtest.Exec(t, pool, `UPDATE effectonce.idempotency_keys SET lock_token = lock_token + 1 WHERE key = '5'`) // decided, and in doubt again
		}
	})
	assert.Equal(t, 599, report.Done)
	require.Len(t, report.Left, 2)
	assert.Contains(t, report.Left[0].Why, "may be on its way until")
	assert.Contains(t, report.Left[1].Why, "it changed meanwhile")
	assert.Equal(t, 1202-2, pgtest.Value[int](t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE operation = 'charge' AND state = 'running'`))
	assert.Equal(t, 1200, pgtest.Value[int](t, pool, `SELECT count(*) FROM effectonce.operator_actions WHERE what = 'key.retry'`))
	assert.Equal(t, "abandoned", find(t, pool, "not meant").State)
}

// Property: a decision that the call happened is shown, and taken back by a later one: the call is made.
func TestDecisionIsTakenBack(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	pgtest.Exec(t, pool, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, phases, flow, calling, call) VALUES ('t', 'charge', 'k', sha256('x'), 'indeterminate', '{}', 'f', 'pay', 'once')`)
	place := keys.Place{Scope: "t", Operation: "charge", Key: "k"}
	for _, call := range []keys.Call{keys.CallHappened, keys.CallUnknown, keys.CallDidNotHappen} {
		changed, err := keys.Retry(t.Context(), pool, schema, ana, place, call)
		require.NoError(t, err)
		require.Equal(t, call != keys.CallDidNotHappen, changed.Now.Call == "happened")
		pgtest.Exec(t, pool, `UPDATE effectonce.idempotency_keys SET state = 'abandoned'`)
	}
}
