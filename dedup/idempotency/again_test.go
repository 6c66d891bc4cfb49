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
// certainly not made, was not yet begun, or belongs to a phase that is done, has no age. What the
// previous release did to a key counts as a call. Rows H5, H17 of guarantees.md.
func TestAgeCountsFromTheCall(t *testing.T) {
	t.Parallel()
	const (
		taken   = `UPDATE effectonce.idempotency_keys SET lock_token = lock_token + 1, attempts = attempts + 1, locked_until = clock_timestamp() + interval '30 s', locked_by = 'previous', retry_at = NULL`
		unlocks = `UPDATE effectonce.idempotency_keys SET locked_until = NULL, error = 'no answer', retry_at = clock_timestamp(), calling = nullif(calling, NULL)`
	)
	for name, c := range map[string]struct {
		first error  // of the call
		early bool   // the client leaves before the call
		sql   string // what happens then
		again bool   // the call is made
	}{
		"no answer":                          {first: errSilent},
		"not done":                           {first: idempotency.NotDone(errAway), again: true},
		"left before":                        {early: true, again: true},
		"not done, and the previous release": {first: idempotency.NotDone(errAway), sql: taken + ";" + unlocks},
		"a person gave it back":              {first: errSilent, sql: `UPDATE effectonce.idempotency_keys SET lock_token = lock_token + 1, attempts = 0, locked_until = NULL`},
		"a person knows that it did nothing": {first: errSilent, sql: `UPDATE effectonce.idempotency_keys SET lock_token = lock_token + 1, attempts = 0, uncalled = lock_token + 1, locked_until = NULL`, again: true},
		"of the previous release":            {first: idempotency.NotDone(errAway), sql: `UPDATE effectonce.idempotency_keys SET flow = NULL, phase_since = NULL, uncalled = NULL`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, asked, answer := newPool(t), 0, c.first
			flow := charges(t, pool, func() error { asked++; return answer }, idempotency.Unknown())
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			_, err := flow.Do(crashpoint.With(ctx, func(at string) {
				if c.early && at == crashpoint.KeyAdvanced {
					cancel()
				}
			}), key("k"), nil)
			require.Error(t, err)
			if c.sql != "" {
				_, err = pool.Exec(t.Context(), c.sql)
				require.NoError(t, err)
			}
			passes(t, pool, 30*time.Hour)
			before := asked
			answer = errSilent
			_, err = flow.Do(t.Context(), key("k"), nil)
			if !c.again {
				require.ErrorIs(t, err, idempotency.ErrIndeterminate)
				require.Equal(t, before, asked)
				return
			}
			require.ErrorIs(t, err, errSilent)
			require.Equal(t, before+1, asked)
			// From here on it counts: a later attempt that did nothing says nothing of this one.
			passes(t, pool, 12*time.Hour)
			answer = idempotency.NotDone(errAway)
			_, err = flow.Do(t.Context(), key("k"), nil)
			require.ErrorIs(t, err, errAway)
			passes(t, pool, 12*time.Hour)
			_, err = flow.Do(t.Context(), key("k"), nil)
			require.ErrorIs(t, err, idempotency.ErrIndeterminate)
			require.Equal(t, before+2, asked)
		})
	}
}

// Property: a phase whose predecessor took days has its own age. Row H5 of guarantees.md.
func TestPhaseThatBeginsLateIsCalledAgain(t *testing.T) {
	t.Parallel()
	pool, asked, answer := newPool(t), 0, errSilent
	flow := charges(t, pool, func() error { asked++; return answer }, idempotency.Unknown())
	_, err := flow.Do(crashpoint.With(t.Context(), func(at string) {
		if at == crashpoint.KeyClaimed {
			passes(t, pool, 72*time.Hour)
		}
	}), key("k"), nil)
	require.ErrorIs(t, err, errSilent)
	answer = nil
	_, err = flow.Do(t.Context(), key("k"), nil)
	require.NoError(t, err)
	require.Equal(t, 2, asked)
	require.Equal(t, 1, effects(t, pool, "charge"))
}

// Property: a call has all of its time, also where the note before it, that it is made at most
// once, waited for longer. Row H5 of guarantees.md.
func TestCallHasAllOfItsTime(t *testing.T) {
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

// Property: settings that contradict each other are rejected, with the field, its value and the
// valid values. A call that is not repeated has no CallAgainMax.
func TestCallAgainMaxIsBounded(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	call := func(age time.Duration, atMostOnce bool) idempotency.Phase[payment] {
		return idempotency.Phase[payment]{Name: "charge", AtMostOnce: atMostOnce, CallAgainMax: age, Call: func(context.Context, *step) error { return nil }}
	}
	without := ends("charge")
	without.CallAgainMax = time.Hour
	for want, c := range map[string]struct {
		cfg   idempotency.FlowConfig[payment]
		phase idempotency.Phase[payment]
	}{
		`CallAgainMax of phase "charge" 30s: want 1m0s to 87600h0m0s`:    {phase: call(30*time.Second, false)},
		`CallAgainMax of phase "charge" 2m0s: want 1h0m0s to 87600h0m0s`: {idempotency.FlowConfig[payment]{CallMax: time.Hour}, call(2*time.Minute, false)},
		`CallAgainMax of phase "charge" 1h0m0s: want none`:               {phase: call(time.Hour, true)},
		`CallAgainMax of phase "charge" 1h0m0s: want none:`:              {phase: without},
		`AtOnceMax 1001: want 1 to 1000`:                                 {idempotency.FlowConfig[payment]{AtOnceMax: 1001}, ends("charge")},
		`AgeMax 1s: want 1m0s to 87600h0m0s`:                             {idempotency.FlowConfig[payment]{AgeMax: time.Second}, ends("charge")},
		`Name "a\n": want at most 255 bytes`:                             {idempotency.FlowConfig[payment]{Name: "a\n"}, ends("charge")},
	} {
		_, err := idempotency.NewFlow(newOperation(t, pool, idempotency.Config{}), c.cfg, c.phase)
		require.ErrorContains(t, err, want)
	}
}
