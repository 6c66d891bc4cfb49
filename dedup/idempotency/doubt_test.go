package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// stateOf is the state of a key.
func stateOf(t *testing.T, pool *pgxpool.Pool, value string) (state string) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT state FROM effectonce.idempotency_keys WHERE key = $1`, value).Scan(&state))
	return state
}

type step = idempotency.Step[payment]

// calls is a phase whose call does something, and whose write has an effect.
func calls(atMostOnce bool, call func(s *step) error) idempotency.Phase[payment] {
	return idempotency.Phase[payment]{
		Name: "charge", AtMostOnce: atMostOnce,
		Call:  func(_ context.Context, s *step) error { return call(s) },
		Write: func(ctx context.Context, tx pgx.Tx, _ *step) error { return effect(ctx, tx, "charge") },
	}
}

func ends(name string) idempotency.Phase[payment] {
	return idempotency.Phase[payment]{Name: name, Write: func(ctx context.Context, tx pgx.Tx, s *step) error {
		s.Finish(idempotency.Response{Status: 201})
		return effect(ctx, tx, name)
	}}
}

// Property: a call that must not be repeated, and whose worker died during it, leaves the key in
// doubt even at the last attempt: "given up" would make a person retry it. Row H5 of guarantees.md.
func TestLostCallOfTheLastAttemptIsInDoubt(t *testing.T) {
	t.Parallel()
	pool, made := newPool(t), 0
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{AttemptsMax: 1}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{
		calls(true, func(*step) error { made++; panic("the process dies") }), ends("ship"),
	})
	require.Panics(t, func() { _, _ = flow.Do(t.Context(), key("k"), nil) })
	_, err := pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET locked_until = clock_timestamp()`)
	require.NoError(t, err)
	for range 2 {
		_, err = flow.Do(t.Context(), key("k"), nil)
		require.ErrorIs(t, err, idempotency.ErrIndeterminate)
		require.NotErrorIs(t, err, idempotency.ErrAbandoned)
	}
	require.Equal(t, 1, made)
	require.Equal(t, "indeterminate", stateOf(t, pool, "k"))
}

// Property: a decision of a call stays when the writes after it are run again after a conflict: a
// flow that the call finished runs no other phase. Row H20 of guarantees.md.
func TestCallThatEndsTheFlowEndsItAfterAConflict(t *testing.T) {
	t.Parallel()
	pool, conflicts := newPool(t), 1
	declined := calls(false, func(s *step) error { s.Finish(idempotency.Response{Status: 402}); return nil })
	declined.Write = func(ctx context.Context, tx pgx.Tx, _ *step) error {
		if conflicts--; conflicts >= 0 {
			return &pgconn.PgError{Code: "40P01"}
		}
		return effect(ctx, tx, "declined")
	}
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{declined, ends("ship")})
	response, err := flow.Do(t.Context(), key("k"), nil)
	require.NoError(t, err)
	require.Equal(t, 402, response.Status)
	require.Equal(t, 1, effects(t, pool, "declined"))
	require.Zero(t, effects(t, pool, "ship"))
}

// Property: a strict flow stores failures of its phases, but not that its client left or that two
// transactions conflicted: those do not depend on the request, which continues where it was. Rows
// H18 to H20.
func TestStrictFlowStoresOnlyFailuresOfItsPhases(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	op := newOperation(t, pool, idempotency.Config{Strict: true, Retries: 1})
	leave := func() {}
	var fail error
	flow := newFlow(t, op, idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{
		calls(false, func(*step) error { leave(); return nil }),
		{Name: "book", Write: func(ctx context.Context, tx pgx.Tx, s *step) error {
			s.Finish(idempotency.Response{Status: 201})
			return errors.Join(fail, effect(ctx, tx, "book"))
		}},
	})
	ctx, cancel := context.WithCancel(t.Context())
	leave = cancel
	_, err := flow.Do(ctx, key("left"), nil)
	require.ErrorIs(t, err, context.Canceled)
	leave = func() {}
	fail = &pgconn.PgError{Code: "40001"}
	for _, value := range []string{"left", "met"} {
		_, err = flow.Do(t.Context(), key(value), nil)
		require.ErrorIs(t, err, fail)
		require.Equal(t, "running", stateOf(t, pool, value))
	}
	fail = nil
	for _, value := range []string{"left", "met"} {
		response, err := flow.Do(t.Context(), key(value), nil)
		require.NoError(t, err)
		require.Equal(t, idempotency.Response{Status: 201}, response)
	}
	fail = errAway
	for range 2 {
		response, err := flow.Do(t.Context(), key("failed"), nil)
		require.NoError(t, err)
		require.Equal(t, 500, response.Status)
	}
}

// Property: an error that is not valid text, as foreign systems may return, neither keeps a key
// locked nor makes a call in doubt repeatable. Row H5 of guarantees.md.
func TestErrorsOfAnyBytes(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	garbage := errors.New("bank says \xff\x00\xfe" + strings.Repeat("\xff", 3000))
	made := 0
	op := newOperation(t, pool, idempotency.Config{AttemptsMax: 2})
	flow := newFlow(t, op, idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{
		calls(false, func(s *step) error {
			made++
			if s.Key.Value == "doubt" {
				return idempotency.Indeterminate(garbage)
			}
			return garbage
		}), ends("ship"),
	})
	for range 2 {
		_, err := flow.Do(t.Context(), key("doubt"), nil)
		require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	}
	require.Equal(t, 1, made)
	_, err := flow.Do(t.Context(), key("failed"), nil)
	require.ErrorIs(t, err, garbage)
	require.Equal(t, 1, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE key = 'failed' AND locked_until IS NULL AND error LIKE 'call of phase "charge": bank says %'`))
	for range 2 { // the second one is the outcome
		_, err = op.Once(t.Context(), key("once"), func(context.Context, pgx.Tx) (idempotency.Response, error) { return idempotency.Response{}, garbage })
	}
	require.NoError(t, err)
}

// Property: work in one transaction that called another system, and does not know the outcome, is
// not run again automatically: a person decides. Row H5 of guarantees.md.
func TestWorkInDoubtIsNotRunAgain(t *testing.T) {
	t.Parallel()
	pool, ran := newPool(t), 0
	o := newOperation(t, pool, idempotency.Config{})
	work := func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		ran++
		return idempotency.Response{}, errors.Join(effect(ctx, tx, "k"), idempotency.Indeterminate(errAway))
	}
	for range 3 {
		_, err := o.Once(t.Context(), key("k"), work)
		require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	}
	require.Equal(t, 1, ran)
	require.Zero(t, effects(t, pool, "k"))
	require.Equal(t, "indeterminate", stateOf(t, pool, "k"))
}

// Property: what the work reports about another system counts even if it misused its transaction:
// Indeterminate stays indeterminate, and Final is stored; the same holds for the Write of a phase.
// Rows H5, H18 of guarantees.md.
func TestMisuseHidesNoVerdict(t *testing.T) {
	t.Parallel()
	pool, ran := newPool(t), 0
	o := newOperation(t, pool, idempotency.Config{})
	verdicts := map[string]error{
		"doubt": idempotency.Indeterminate(errAway), "final": idempotency.Final(idempotency.Response{Status: 402}, errors.New("declined")),
	}
	misuse := func(ctx context.Context, tx pgx.Tx, value string) error {
		ran++
		return errors.Join(effect(ctx, tx, "k"), tx.Rollback(ctx), verdicts[value])
	}
	flow := newFlow(t, o, idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{{Name: "all", Write: func(ctx context.Context, tx pgx.Tx, s *step) error {
		return misuse(ctx, tx, s.Key.Value[len("flow "):])
	}}})
	for n := range 3 {
		for value := range verdicts {
			once, err := o.Once(t.Context(), key(value), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
				return idempotency.Response{}, misuse(ctx, tx, value)
			})
			phases, flowErr := flow.Do(t.Context(), key("flow "+value), nil)
			if value == "doubt" {
				require.ErrorIs(t, err, idempotency.ErrIndeterminate)
				require.ErrorIs(t, flowErr, idempotency.ErrIndeterminate)
				continue
			}
			require.NoError(t, errors.Join(err, flowErr))
			for _, response := range []idempotency.Response{once, phases} {
				require.Equal(t, idempotency.Response{Status: 402, Replayed: n > 0}, response)
			}
		}
	}
	require.Equal(t, 4, ran)
	require.Zero(t, effects(t, pool, "k"))
	require.Equal(t, "indeterminate", stateOf(t, pool, "doubt"))
	require.Equal(t, "indeterminate", stateOf(t, pool, "flow doubt"))
}

// Property: Indeterminate because of a conflict in the database is indeterminate: neither the work
// nor a phase is run again. Row H5 of guarantees.md.
func TestDoubtIsNoConflict(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o, ran := newOperation(t, pool, idempotency.Config{}), 0
	unknown := func() error {
		ran++
		return idempotency.Indeterminate(&pgconn.PgError{Code: "40001"})
	}
	_, err := o.Once(t.Context(), key("once"), func(context.Context, pgx.Tx) (idempotency.Response, error) { return idempotency.Response{}, unknown() })
	require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	flow := newFlow(t, o, idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{{Name: "charge", Write: func(context.Context, pgx.Tx, *step) error { return unknown() }}, ends("ship")})
	_, err = flow.Do(t.Context(), key("flow"), nil)
	require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	require.Equal(t, 2, ran)
	for _, value := range []string{"once", "flow"} {
		require.Equal(t, "indeterminate", stateOf(t, pool, value))
	}
}

// Property: errors about the key of another operation, which the work used, do not apply to this
// operation's key: no client learns that it should take another key, or that nothing was done, and
// nothing is done again while the request waits.
func TestVerdictsOfOtherKeysAreNotThisOnes(t *testing.T) {
	t.Parallel()
	pool, asked := newPool(t), 0
	inner := []error{
		idempotency.ErrMismatch, &idempotency.InProgressError{RetryAfter: time.Second}, idempotency.ErrAbandoned, idempotency.ErrLockLost,
		idempotency.ErrUnknownRecoveryPoint, idempotency.ErrUnanswered, idempotency.ErrInvalid, &pgconn.PgError{Code: "EO003"},
	}
	o := newOperation(t, pool, idempotency.Config{})
	for n, err := range inner {
		once, phases := key(fmt.Sprint("once ", n)), key(fmt.Sprint("flow ", n))
		flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{calls(false, func(*step) error {
			asked++
			return fmt.Errorf("the other operation: %w", err)
		}), ends("ship")})
		_, got := flow.Do(t.Context(), phases, nil)
		_, gotOnce := o.Once(t.Context(), once, func(context.Context, pgx.Tx) (idempotency.Response, error) { return idempotency.Response{}, err })
		for _, got := range []error{got, gotOnce} {
			require.ErrorContains(t, got, err.Error())
			for _, verdict := range []error{idempotency.ErrMismatch, idempotency.ErrInProgress, idempotency.ErrAbandoned, idempotency.ErrLockLost, idempotency.ErrUnknownRecoveryPoint, idempotency.ErrUnanswered, idempotency.ErrInvalid} {
				require.NotErrorIs(t, got, verdict)
			}
		}
		require.Equal(t, 1, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE key = $1 AND state = 'running' AND locked_until IS NULL`, phases.Value), "it is free at once")
	}
	require.Len(t, inner, asked)
}

// Property: a Write that returns NotDone does not affect the call before it, which was made: the
// key is in doubt at once, with the error. The same holds if the phase panics in the completer. Row
// H5.
func TestWriteCannotTakeBackACall(t *testing.T) {
	t.Parallel()
	pool, made := newPool(t), 0
	charged := calls(true, func(*step) error { made++; return nil })
	charged.Write = func(context.Context, pgx.Tx, *step) error { return idempotency.NotDone(errAway) }
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{charged, ends("ship")})
	_, err := flow.Do(t.Context(), key("k"), nil)
	require.ErrorIs(t, err, errAway)
	require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	require.Equal(t, 1, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'indeterminate' AND calling = 'charge' AND error LIKE '%away%'`))
	_, err = flow.Do(t.Context(), key("k"), nil)
	require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	require.Equal(t, 1, made)

	away := true
	charged = calls(true, func(*step) error {
		if away {
			return idempotency.NotDone(errAway)
		}
		return nil
	})
	charged.Write = func(context.Context, pgx.Tx, *step) error { panic("nil map") }
	flow = newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{StoreRequest: true}, []idempotency.Phase[payment]{charged, ends("ship")})
	_, err = flow.Do(t.Context(), key("panics"), nil)
	require.ErrorIs(t, err, errAway)
	require.NotErrorIs(t, err, idempotency.ErrIndeterminate)
	passes(t, pool, time.Hour)
	away = false
	_, err = flow.Complete(t.Context())
	require.ErrorContains(t, err, "nil map")
	require.Equal(t, 1, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE key = 'panics' AND state = 'indeterminate' AND error LIKE '%nil map%'`))
}

// Property: the reconciler is called when a call that was on its way to the foreign system has
// arrived, by the database's clock, and not before; one that panics or hangs decides nothing. Row
// H5.
func TestReconcilerIsAskedAfterAWhile(t *testing.T) {
	t.Parallel()
	pool, asked := newPool(t), 0
	answer := func(context.Context) idempotency.Decision { panic("reconciler") }
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{
		CallMax: 10 * time.Second,
		Reconcile: func(ctx context.Context, _ idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
			asked++
			return answer(ctx), nil
		},
	}, []idempotency.Phase[payment]{calls(true, func(*step) error { return errAway }), ends("ship")})
	_, err := flow.Do(t.Context(), key("k"), nil)
	require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	_, err = flow.Reconcile(t.Context())
	require.NoError(t, err)
	require.Zero(t, asked)
	passes(t, pool, 10*time.Second)
	_, err = flow.Reconcile(t.Context())
	require.ErrorContains(t, err, "panic: reconciler")
	answer = func(ctx context.Context) idempotency.Decision { <-ctx.Done(); return idempotency.Unknown() }
	decided, err := flow.Reconcile(t.Context())
	require.NoError(t, err)
	require.Zero(t, decided)
	_, err = flow.Reconcile(t.Context())
	require.NoError(t, err)
	require.Equal(t, 2, asked, "it is not asked again at once")
	passes(t, pool, time.Hour)
	answer = func(context.Context) idempotency.Decision {
		return idempotency.Happened(idempotency.Response{Status: 201})
	}
	decided, err = flow.Reconcile(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, decided)
	require.Equal(t, 3, asked)
}

// Property: the reconciler of a flow is not called for indeterminate work in one transaction of the
// same operation, even if that took the key over from a flow: a key that it returned would run
// again, although its effect exists. Row H5 of guarantees.md.
func TestReconcilerIsNotAskedAboutWork(t *testing.T) {
	t.Parallel()
	pool, away := newPool(t), errAway
	o := newOperation(t, pool, idempotency.Config{})
	flow := newFlow(t, o, idempotency.FlowConfig[payment]{
		Reconcile: func(context.Context, idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
			return idempotency.DidNotHappen(), nil
		},
	}, []idempotency.Phase[payment]{calls(false, func(*step) error { return away }), ends("ship")})
	unknown := func(context.Context, pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{}, idempotency.Indeterminate(errAway)
	}
	values := []string{"committed", "unknown", "committed by a flow", "unknown by a flow"}
	for n, value := range values {
		if n >= 2 {
			_, err := flow.Do(t.Context(), key(value), nil)
			require.ErrorIs(t, err, errAway)
		}
		work := unknown
		if n%2 == 0 {
			work = committed
		}
		_, err := o.Once(t.Context(), key(value), work)
		require.ErrorIs(t, err, idempotency.ErrIndeterminate, value)
	}
	_, err := pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET locked_by = 'flow' WHERE key = 'committed by a flow'`) // as an operator's reap leaves it
	require.NoError(t, err)
	passes(t, pool, time.Hour)
	decided, err := flow.Reconcile(t.Context())
	require.NoError(t, err)
	require.Zero(t, decided)
	for _, value := range values {
		_, err := o.Once(t.Context(), key(value), committed)
		require.ErrorIs(t, err, idempotency.ErrIndeterminate, value)
	}
	require.Equal(t, 2, effects(t, pool, "k"))

	// A person gave a key back, and the flow took it: it is asked about that one.
	_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET state = 'running', lock_token = lock_token + 1, expires_at = NULL WHERE key = 'unknown'`)
	require.NoError(t, err)
	away = idempotency.Indeterminate(errAway)
	_, err = flow.Do(t.Context(), key("unknown"), nil)
	require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	passes(t, pool, time.Hour)
	decided, err = flow.Reconcile(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, decided)
}

// Property: a phase that panics does not end the completer's program, and the key is free for the
// next attempt. Row H1 of guarantees.md.
func TestCompleterSurvivesAPanic(t *testing.T) {
	t.Parallel()
	pool, fail := newPool(t), func() error { return errAway }
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{StoreRequest: true}, []idempotency.Phase[payment]{
		calls(false, func(*step) error { return fail() }), ends("ship"),
	})
	_, err := flow.Do(t.Context(), key("k"), nil)
	require.ErrorIs(t, err, errAway)
	passes(t, pool, time.Hour)
	fail = func() error { panic("nil map") }
	_, err = flow.Complete(t.Context())
	require.ErrorContains(t, err, "panic: nil map")
	require.Equal(t, 1, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'running' AND locked_until IS NULL AND error LIKE '%nil map%'`))
	passes(t, pool, time.Hour)
	fail = func() error { return nil }
	finished, err := flow.Complete(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, finished)
}

// Property: clients that retry repeatedly while a foreign system is unavailable do not use up a
// flow's attempts: from the tenth on they wait as the completer does. Row H1 of guarantees.md.
func TestImpatientClientsUseNoAttemptsUp(t *testing.T) {
	t.Parallel()
	pool, away := newPool(t), true
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{WaitMax: time.Millisecond}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{
		calls(false, func(*step) error {
			if away {
				return errAway
			}
			return nil
		}), ends("ship"),
	})
	for n := range 50 {
		_, err := flow.Do(t.Context(), key("k"), nil)
		if n < 10 {
			require.ErrorIs(t, err, errAway, n)
			continue
		}
		var progress *idempotency.InProgressError
		require.ErrorAs(t, err, &progress)
		require.Greater(t, progress.RetryAfter, 4*time.Minute)
	}
	away = false
	passes(t, pool, time.Hour)
	_, err := flow.Do(t.Context(), key("k"), nil)
	require.NoError(t, err)
}

// Property: a statement of a goroutine that outlives the work runs in no other transaction: nothing
// is committed, even if the work panics.
func TestGoroutineLeftBehindCommitsNothing(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(){"returns": func() {}, "panics": func() { panic("work") }} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			o := newOperation(t, pool, idempotency.Config{WaitMax: 10 * time.Second})
			over := make(chan struct{})
			work := func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
				if err := effect(ctx, tx, "k"); err != nil {
					return idempotency.Response{}, err
				}
				go func() {
					defer close(over)
					_, _ = tx.Exec(ctx, `SELECT pg_sleep(60) AS left_behind`) // it is cut off
				}()
				if err := until(ctx, pool, `SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%left_behind' AND pid <> pg_backend_pid()`); err != nil {
					return idempotency.Response{}, err
				}
				end()
				return idempotency.Response{Status: 201}, nil
			}
			func() {
				defer func() { assert.Equal(t, name == "panics", recover() != nil) }()
				_, err := o.Once(t.Context(), key("k"), work)
				require.ErrorContains(t, err, "two goroutines")
			}()
			<-over
			require.Zero(t, effects(t, pool, "k"))
			_, err := o.Once(t.Context(), key("k"), insertOnce("k"))
			require.NoError(t, err)
			require.Equal(t, 1, effects(t, pool, "k"))
		})
	}
}

// Property: the outcome of work that took longer than its window is still stored for a while. Row
// H16.
func TestWindowBeginsWithTheOutcome(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{Window: time.Minute})
	_, err := o.Once(t.Context(), key("k"), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		_, err := tx.Exec(ctx, `UPDATE effectonce.idempotency_keys SET expires_at = expires_at - interval '2 minutes'`) // as if it had taken so long
		return idempotency.Response{Status: 201}, errors.Join(err, effect(ctx, tx, "k"))
	})
	require.NoError(t, err)
	reaped, err := o.Reap(t.Context())
	require.NoError(t, err)
	require.Zero(t, reaped)
	response, err := o.Once(t.Context(), key("k"), insertOnce("k"))
	require.NoError(t, err)
	require.True(t, response.Replayed)
}

// Property: settings that cannot work are refused at the start, and an ID that other requests would
// share is not made.
func TestWhatCannotWorkIsRefused(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		_, err := idempotency.NewFlow(newOperation(t, pool, idempotency.Config{Isolation: level}), idempotency.FlowConfig[payment]{}, ends("all"))
		require.ErrorContains(t, err, "Isolation")
	}
	require.Panics(t, func() { key("k").ChildID("charge") })
	whole := newOperation(t, pool, idempotency.Config{}).Key("tenant", "k", idempotency.Fingerprint{})
	require.Equal(t, idempotency.Key{Scope: "tenant", Operation: "order", Value: "k"}.ChildID("charge"), whole.ChildID("charge"))
}
