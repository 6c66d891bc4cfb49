package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

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

// errSilent is a foreign system that may have acted.
var errSilent = errors.New("no answer")

// charges is a program with a flow that reserves, charges and ships; charge is its call, and
// decision its reconciler's.
func charges(t *testing.T, pool *pgxpool.Pool, charge func() error, decision idempotency.Decision) *idempotency.Flow[payment] {
	t.Helper()
	return newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{
		Reconcile: func(_ context.Context, undecided idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
			require.Equal(t, "charge", undecided.Phase)
			return decision, nil
		},
	}, []idempotency.Phase[payment]{
		{Name: "reserve", Write: func(context.Context, pgx.Tx, *step) error { return nil }},
		calls(false, func(*step) error { return charge() }), ends("ship"),
	})
}

// Property: a call that may have been made is repeated only while the foreign system remembers its
// key: within CallAgainMax of the first call, by the database's clock, however wrong this process's
// clock is. After that the key is in doubt; the reconciler, which gets the phase, can have the call
// repeated, any number of times. Row H5 of guarantees.md.
func TestCallIsNotRepeatedAtAForgetfulProvider(t *testing.T) {
	t.Parallel()
	for name, off := range offs() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, pass := skewed(t, off)
			asked, answer := 0, errSilent
			flow := charges(t, pool, func() error { asked++; return answer }, idempotency.DidNotHappen())
			again := func(after time.Duration, want error, calls int) {
				pass(after)
				_, err := flow.Do(t.Context(), key("k"), nil)
				require.ErrorIs(t, err, want)
				require.Equal(t, calls, asked)
			}
			again(0, errSilent, 1)
			again(11*time.Hour, errSilent, 2)
			again(10*time.Hour, errSilent, 3)
			again(2*time.Hour, idempotency.ErrIndeterminate, 3)
			again(0, idempotency.ErrIndeterminate, 3)
			require.Equal(t, 1, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'indeterminate' AND calling IS NULL AND phases = '{reserve}' AND error LIKE '%CallAgainMax%'`))
			pass(time.Hour)
			decided, err := flow.Reconcile(t.Context())
			require.NoError(t, err)
			require.Equal(t, 1, decided)
			again(30*time.Hour, errSilent, 4)
			again(21*time.Hour, errSilent, 5)
			again(2*time.Hour, idempotency.ErrIndeterminate, 5)
			require.Zero(t, effects(t, pool, "charge"))
		})
	}
}

// Property: the age is that of a call that may have been made, not of the request: a call that was
// certainly not made, was not yet begun, or belongs to a phase that is done, has no age. Rows H5, H17 of guarantees.md.
func TestAgeCountsFromTheCall(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	for name, c := range map[string]struct {
		first error  // of the call
		early bool   // the client leaves before the call
		sql   string // what happens then
		again bool   // the call is made
	}{
		"no answer":                          {first: errSilent},
		"not done":                           {first: idempotency.NotDone(errAway), again: true},
		"left before":                        {early: true, again: true},
		"a person gave it back":              {first: errSilent, sql: `lock_token = lock_token + 1, attempts = 0, locked_until = NULL`},
		"a person knows that it did nothing": {first: errSilent, sql: `lock_token = lock_token + 1, attempts = 0, uncalled = lock_token + 1, locked_until = NULL`, again: true},
	} {
		asked, answer := 0, c.first
		flow := charges(t, pool, func() error { asked++; return answer }, idempotency.Unknown())
		ctx, cancel := context.WithCancel(t.Context())
		_, err := flow.Do(crashpoint.With(ctx, func(at string) {
			if c.early && at == crashpoint.KeyAdvanced {
				cancel()
			}
		}), key(name), nil)
		require.Error(t, err)
		cancel()
		if c.sql != "" {
			_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET `+c.sql+` WHERE key = $1`, name)
			require.NoError(t, err)
		}
		passes(t, pool, 30*time.Hour)
		before := asked
		answer = errSilent
		_, err = flow.Do(t.Context(), key(name), nil)
		if !c.again {
			require.ErrorIs(t, err, idempotency.ErrIndeterminate, name)
			require.Equal(t, before, asked)
			continue
		}
		require.ErrorIs(t, err, errSilent, name)
		require.Equal(t, before+1, asked)
		// From here on it counts: a later attempt that did nothing says nothing of this one.
		for _, want := range []error{errAway, idempotency.ErrIndeterminate} {
			passes(t, pool, 12*time.Hour)
			answer = idempotency.NotDone(errAway)
			_, err = flow.Do(t.Context(), key(name), nil)
			require.ErrorIs(t, err, want, name)
		}
		require.Equal(t, before+2, asked)
	}
}

// skewedSQL puts another clock in front of the database's own: in statements by the search path, in
// functions and defaults by name.
const skewedSQL = `
CREATE SCHEMA skewed;
CREATE TABLE skewed.clock (ahead interval NOT NULL);
INSERT INTO skewed.clock VALUES ('0');
CREATE FUNCTION skewed.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE RETURN (SELECT pg_catalog.clock_timestamp() + ahead FROM skewed.clock);
ALTER FUNCTION effectonce.finish_key SET search_path = skewed, pg_catalog, pg_temp;
ALTER FUNCTION effectonce.advance_key SET search_path = skewed, pg_catalog, pg_temp;
ALTER TABLE effectonce.idempotency_keys ALTER created_at SET DEFAULT skewed.clock_timestamp()`

// skewed returns a pool on a database whose clock is off by so much, and a function that makes its
// time pass.
func skewed(t *testing.T, off time.Duration) (*pgxpool.Pool, func(time.Duration)) {
	t.Helper()
	config, err := pgxpool.ParseConfig(pgtest.Database(t))
	require.NoError(t, err)
	config.ConnConfig.RuntimeParams["search_path"] = "skewed, pg_catalog, public"
	pool := pgtest.PoolOf(t, config)
	_, err = pool.Exec(t.Context(), skewedSQL+`; CREATE TABLE public.effects (id bigint GENERATED ALWAYS AS IDENTITY, name text NOT NULL)`)
	require.NoError(t, err)
	pass := func(d time.Duration) {
		_, err := pool.Exec(t.Context(), `UPDATE skewed.clock SET ahead = ahead + $1`, d)
		require.NoError(t, err)
	}
	pass(off)
	return pool, pass
}

// offs are by how much the database's clock differs from this process's.
func offs() map[string]time.Duration {
	return map[string]time.Duration{"two days behind": -48 * time.Hour, "two days ahead": 48 * time.Hour}
}

// Property: a dead worker's lock expires, a window ends and the completer retries by the database's
// clock, however wrong this process's clock is. Rows H1, H16 of guarantees.md.
func TestOnlyTheDatabasesClockCounts(t *testing.T) {
	t.Parallel()
	for name, off := range offs() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, pass := skewed(t, off)
			op := newOperation(t, pool, idempotency.Config{WaitMax: time.Millisecond})
			var fails error
			f := newFlow(t, op, idempotency.FlowConfig[payment]{StoreRequest: true, RetryAfter: time.Minute}, []idempotency.Phase[payment]{calls(false, func(*step) error { return fails }), ends("ship")})
			died := make(chan struct{})
			go func() {
				defer close(died)
				_, _ = f.Do(crashpoint.With(t.Context(), func(string) { runtime.Goexit() }), key("a"), nil)
			}()
			testwait.Chan(t, "the worker dies", died)
			_, err := f.Do(t.Context(), key("a"), nil)
			var busy *idempotency.InProgressError
			require.ErrorAs(t, err, &busy)
			require.Greater(t, busy.RetryAfter, 15*time.Second)
			require.LessOrEqual(t, busy.RetryAfter, 30*time.Second)
			pass(31 * time.Second)
			_, err = f.Do(t.Context(), key("a"), nil)
			require.NoError(t, err)

			forgets := func(after time.Duration, keys int64) {
				pass(after)
				reaped, err := op.Reap(t.Context())
				require.NoError(t, err)
				require.Equal(t, keys, reaped)
			}
			forgets(23*time.Hour, 0)
			_, err = op.Once(t.Context(), key("once"), insertOnce("once"))
			require.NoError(t, err)
			forgets(2*time.Hour, 1) // the flow's, not the one of two hours ago
			forgets(23*time.Hour, 1)

			fails = errAway
			_, err = f.Do(t.Context(), key("b"), []byte("request"))
			require.ErrorIs(t, err, errAway)
			fails = nil
			for after, finished := range []int{0, 1} {
				pass(time.Duration(after) * 61 * time.Second)
				n, err := f.Complete(t.Context())
				require.NoError(t, err)
				require.Equal(t, finished, n)
			}
		})
	}
}

// Property: a call has all of its time, also where the note before it, that it is made at most
// once, waited for longer. Row H5 of guarantees.md.
func TestCallHasAllOfItsTime(t *testing.T) {
	longtest.Only(t, "calls of real seconds")
	t.Parallel()
	pool := newPool(t)
	op := newOperation(t, pool, idempotency.Config{LockTimeout: time.Minute, StatementTimeout: time.Minute})
	const callMax = 3 * time.Second
	flow := newFlow(t, op, idempotency.FlowConfig[payment]{CallMax: callMax}, []idempotency.Phase[payment]{
		{Name: "reserve", Write: func(context.Context, pgx.Tx, *step) error { return nil }},
		{Name: "charge", AtMostOnce: true, Call: func(ctx context.Context, _ *step) error {
			deadline, ok := ctx.Deadline()
			if !ok || ctx.Err() != nil || time.Until(deadline) < callMax/2 {
				return fmt.Errorf("it has until %v: %w", deadline, ctx.Err())
			}
			return nil
		}},
		ends("ship"),
	})
	var group sync.WaitGroup
	defer group.Wait()
	_, err := flow.Do(crashpoint.With(t.Context(), func(at string) {
		if at != crashpoint.KeyAdvanced || count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE phases = '{reserve}'`) == 0 {
			return
		}
		holder, err := pool.Begin(t.Context())
		require.NoError(t, err)
		_, err = holder.Exec(t.Context(), `SELECT FROM effectonce.idempotency_keys FOR UPDATE`)
		require.NoError(t, err)
		group.Go(func() {
			err := until(t.Context(), pool, somebodyWaits)
			_, slept := holder.Exec(t.Context(), `SELECT pg_sleep(4)`)
			assert.NoError(t, errors.Join(err, slept, holder.Commit(t.Context())))
		})
	}), key("k"), nil)
	require.NoError(t, err)
	require.Equal(t, 1, effects(t, pool, "ship"))
}
