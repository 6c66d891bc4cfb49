package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
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
		nothing("reserve"),
		calls(false, func(*step) error { return charge() }), ends("ship"),
	})
}

// Property: a call that may have been made is repeated only while the foreign system remembers its
// key: within GiveUpAfter of the first call, by the database's clock, however wrong this process's
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
				do(t, flow, "k", want)
				require.Equal(t, calls, asked)
			}
			again(0, errSilent, 1)
			again(11*time.Hour, errSilent, 2)
			again(10*time.Hour, errSilent, 3)
			again(2*time.Hour, idempotency.ErrIndeterminate, 3)
			again(0, idempotency.ErrIndeterminate, 3)
			require.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'indeterminate' AND call = 'repeatable' AND phases = '{reserve}' AND error LIKE '%GiveUpAfter%'`))
			pass(time.Hour)
			reconciles(t, flow, 1)
			again(10*time.Hour, errSilent, 4)
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
		"a person knows that it did nothing": {first: errSilent, sql: `lock_token = lock_token + 1, attempts = 0, calling_since = NULL, locked_until = NULL`, again: true},
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
			pgtest.Exec(t, pool, `UPDATE effectonce.idempotency_keys SET `+c.sql+` WHERE key = $1`, name)
		}
		passes(t, pool, map[bool]time.Duration{true: 15 * time.Hour, false: 30 * time.Hour}[c.again])
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
	pgtest.Exec(t, pool, skewedSQL+`; CREATE TABLE public.effects (id bigint GENERATED ALWAYS AS IDENTITY, name text NOT NULL)`)
	pass := func(d time.Duration) {
		pgtest.Exec(t, pool, `UPDATE skewed.clock SET ahead = ahead + $1`, d)
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
			dies(t, f, crashpoint.KeyClaimed)
			_, err := f.Do(t.Context(), key("k"), nil)
			var busy *idempotency.InProgressError
			require.ErrorAs(t, err, &busy)
			require.Greater(t, busy.RetryAfter, 15*time.Second)
			require.LessOrEqual(t, busy.RetryAfter, 30*time.Second)
			pass(31 * time.Second)
			do(t, f, "k", nil)

			forgets := func(after time.Duration, keys int64) {
				pass(after)
				require.Equal(t, keys, reap(t, pool).Forgotten)
			}
			forgets(23*time.Hour, 0)
			insert(t, op, "once")
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
		nothing("reserve"),
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
		if at != crashpoint.KeyAdvanced || pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE phases = '{reserve}'`) == 0 {
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

// passes makes time pass for all keys.
func passes(t *testing.T, pool *pgxpool.Pool, d time.Duration) {
	t.Helper()
	pgtest.Exec(t, pool, `UPDATE effectonce.idempotency_keys SET created_at = created_at - $1::interval, retry_at = retry_at - $1::interval, phase_since = phase_since - $1::interval,
		calling_since = calling_since - $1::interval`, d)
}

// Property: a completer that does not know the phases that are done runs nothing, gives nothing up
// and uses up no attempts, however long it meets the key; it reports each time, and returns after
// pauses that grow up to a limit. A program that knows the phases continues. Row H17 of
// guarantees.md.
func TestUnknownPhasesWaitForTheirProgram(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	b := newBank(t)
	cfg := idempotency.FlowConfig[payment]{StoreRequest: true, RetryAfter: 5 * time.Second, GiveUpAfter: time.Hour}
	newer := newFlow(t, newOperation(t, pool, idempotency.Config{}), cfg, paymentPhases(b.URL, false))
	phases := paymentPhases(b.URL, false)
	phases[0].Name = "begin"
	older := newFlow(t, newOperation(t, pool, idempotency.Config{}), cfg, phases)
	b.refuse = 1
	_, err := newer.Do(t.Context(), key("k"), []byte("100"))
	require.ErrorIs(t, err, errAway)
	passes(t, pool, time.Minute)
	looked, last := 0, time.Duration(0)
	for elapsed := time.Duration(0); elapsed < 2*time.Hour; {
		_, err := older.Complete(t.Context())
		require.ErrorIs(t, err, idempotency.ErrUnknownRecoveryPoint)
		finished, err := older.Complete(t.Context())
		require.NoError(t, err, "it is put off")
		require.Zero(t, finished)
		looked++
		off := pgtest.Value[time.Duration](t, pool, `SELECT retry_at - clock_timestamp() FROM effectonce.idempotency_keys WHERE state = 'running' AND attempts = 1
			AND error LIKE '%["reserve"]%' AND locked_until IS NULL AND phases = '{reserve}'`)
		require.Greater(t, off, last-5*time.Second)
		require.LessOrEqual(t, off, 500*time.Second, "a hundred times RetryAfter")
		passes(t, pool, off)
		elapsed, last = elapsed+off, off
	}
	require.Less(t, looked, 25, "not every five seconds")
	require.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM effects`))
	_, err = older.Do(t.Context(), key("k"), []byte("100"))
	require.ErrorIs(t, err, idempotency.ErrUnknownRecoveryPoint)
	finished, err := newer.Complete(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, finished)
	requirePaidOnce(t, pool, b)
}

// Property: a call that may be made again is made again by its phase only, also where that is renamed, or
// another one is inserted before it: under another phase it would have another key, and another age.
func TestCallInDoubtBelongsToItsPhase(t *testing.T) {
	t.Parallel()
	pool, asked, away := newPool(t), 0, errSilent
	program := func(names ...string) *idempotency.Flow[payment] {
		var phases []idempotency.Phase[payment]
		for _, name := range names {
			phase := calls(false, func(*step) error { asked++; return away })
			phase.Name = name
			phases = append(phases, phase)
		}
		return newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, append(phases, ends("ship")))
	}
	_, err := program("charge").Do(t.Context(), key("k"), nil)
	require.ErrorIs(t, err, errSilent)
	away = nil
	for _, other := range []*idempotency.Flow[payment]{program("bill"), program("check", "charge"), program()} {
		do(t, other, "k", idempotency.ErrUnknownRecoveryPoint)
	}
	require.Equal(t, 1, asked)
	_, err = program("charge").Do(t.Context(), key("k"), nil)
	require.NoError(t, err)
	require.Equal(t, []int{2, 1}, []int{asked, effects(t, pool, "ship")})
}

// Property: a program that does not know the phase in doubt decides nothing about it: its
// reconciler is not called, the key is postponed, and a program that knows the phase decides. Row
// H17.
func TestDoubtWaitsForAProgramThatKnowsItsPhase(t *testing.T) {
	t.Parallel()
	pool, asked := newPool(t), []string(nil)
	cfg := idempotency.FlowConfig[payment]{Reconcile: func(_ context.Context, undecided idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
		asked = append(asked, undecided.Phase)
		return idempotency.DidNotHappen(), nil
	}}
	program := func(names ...string) *idempotency.Flow[payment] {
		var phases []idempotency.Phase[payment]
		for _, name := range names {
			phase := calls(true, func(*step) error { return errAway })
			if phase.Name = name; name != "ship" {
				phase = nothing(name)
			}
			phases = append(phases, phase)
		}
		return newFlow(t, newOperation(t, pool, idempotency.Config{}), cfg, phases)
	}
	newer := program("reserve", "charge", "ship", "book")
	do(t, newer, "k", idempotency.ErrIndeterminate)
	for _, calling := range []string{`NULL`, `'ship'`} { // where it is not stored, the phases that are done show which one is in doubt
		pgtest.Exec(t, pool, `UPDATE effectonce.idempotency_keys SET calling = `+calling)
		for _, older := range []*idempotency.Flow[payment]{program("reserve", "charge"), program("begin", "charge", "ship")} {
			passes(t, pool, time.Hour)
			decided, err := older.Reconcile(t.Context())
			require.ErrorIs(t, err, idempotency.ErrUnknownRecoveryPoint)
			require.Zero(t, decided)
			_, err = older.Reconcile(t.Context())
			require.NoError(t, err, "it is put off")
		}
	}
	require.Empty(t, asked)
	require.Equal(t, "indeterminate", stateOf(t, pool, "k"))
	passes(t, pool, time.Hour)
	reconciles(t, newer, 1)
	require.Equal(t, []string{"ship"}, asked)
}
