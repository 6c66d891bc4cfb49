package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// stateOf is the state of a key.
func stateOf(t *testing.T, pool *pgxpool.Pool, value string) string {
	t.Helper()
	return pgtest.Value[string](t, pool, `SELECT coalesce((SELECT state::text FROM effectonce.idempotency_keys WHERE key = $1), 'missing')`, value)
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

// nothing is a phase that writes nothing.
func nothing(name string) idempotency.Phase[payment] {
	return idempotency.Phase[payment]{Name: name, Write: func(context.Context, pgx.Tx, *step) error { return nil }}
}

// states is a phase that executes a statement.
func states(name, sql string) idempotency.Phase[payment] {
	return idempotency.Phase[payment]{Name: name, Write: func(ctx context.Context, tx pgx.Tx, _ *step) error {
		_, err := tx.Exec(ctx, sql)
		return err
	}}
}

// Property: Strict makes no outcome of a failure behind a call of which was decided that it happened:
// what it writes, and the phases behind it, follow. An outcome that cannot be stored frees the key.
func TestStrictContinuesWhatHappened(t *testing.T) {
	t.Parallel()
	pool, writes := newPool(t), 0
	charge := calls(true, func(*step) error { return errors.New("it acted, and did not answer") })
	write := charge.Write
	charge.Write = func(ctx context.Context, tx pgx.Tx, s *step) error {
		if writes++; writes == 1 {
			return errors.New("a bug")
		}
		return write(ctx, tx, s)
	}
	cfg := idempotency.Config{Lock: time.Hour, Strict: true, Failed: func(error) idempotency.Response { return idempotency.Response{Status: 100} }}
	flow := newFlow(t, newOperation(t, pool, cfg), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{charge, ends("ship")})
	do(t, flow, "k", idempotency.ErrIndeterminate)
	pgtest.Exec(t, pool, `UPDATE effectonce.idempotency_keys SET state = 'running', call = 'happened', lock_token = lock_token + 1, retry_at = NULL`)
	_, err := flow.Do(t.Context(), key("k"), nil)
	require.ErrorContains(t, err, "a bug")
	response := do(t, flow, "k", nil)
	require.Equal(t, []int{201, 1, 1}, []int{response.Status, effects(t, pool, "charge"), effects(t, pool, "ship")})
	charge.AtMostOnce = false
	flow = newFlow(t, newOperation(t, pool, cfg), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{charge, ends("ship")})
	for range 2 {
		_, err = flow.Do(t.Context(), key("not stored"), nil)
		require.NotErrorIs(t, err, idempotency.ErrInProgress)
		require.ErrorContains(t, err, "status")
	}
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
	once(t, o, "once", idempotency.ErrIndeterminate, func(context.Context, pgx.Tx) (idempotency.Response, error) { return idempotency.Response{}, unknown() })
	flow := newFlow(t, o, idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{{Name: "charge", Write: func(context.Context, pgx.Tx, *step) error { return unknown() }}, ends("ship")})
	do(t, flow, "flow", idempotency.ErrIndeterminate)
	require.Equal(t, 2, ran)
	for _, value := range []string{"once", "flow"} {
		require.Equal(t, "indeterminate", stateOf(t, pool, value))
	}
}

// Property: the outcome of work that took longer than its window is still stored for a while. Row
// H16.
func TestWindowBeginsWithTheOutcome(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{Window: time.Minute})
	once(t, o, "k", nil, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		_, err := tx.Exec(ctx, `UPDATE effectonce.idempotency_keys SET expires_at = expires_at - interval '2 minutes'`) // as if it had taken so long
		return idempotency.Response{Status: 201}, errors.Join(err, effect(ctx, tx, "k"))
	})
	require.Zero(t, reap(t, pool))
	require.True(t, insert(t, o, "k").Replayed)
}

// Property: an error that is not valid text, as foreign systems may return, neither keeps a key
// locked nor makes a call in doubt repeatable. Row H5 of guarantees.md.
func TestErrorsOfAnyBytes(t *testing.T) {
	t.Parallel()
	pool, garbage := newPool(t), errors.New("bank says \xff\x00\xfe"+strings.Repeat("\xff", 3000))
	flow := flowOf(t, pool,
		calls(false, func(s *step) error {
			if s.Key.Value == "doubt" {
				return idempotency.Indeterminate(garbage)
			}
			return garbage
		}), ends("ship"),
	)
	do(t, flow, "doubt", idempotency.ErrIndeterminate)
	require.Equal(t, "indeterminate", stateOf(t, pool, "doubt"))
	do(t, flow, "failed", garbage)
	require.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE key = 'failed' AND locked_until IS NULL AND error LIKE 'call of phase "charge": bank says %'`))
}

// Property: the reconciler is called when a call that was on its way to the foreign system has
// arrived, by the database's clock, and not before; one that panics, or
// does not know, decides nothing; it is not asked again at once. Row H5.
func TestReconcilerIsAskedAfterAWhile(t *testing.T) {
	t.Parallel()
	pool, asked := newPool(t), 0
	answer := func() idempotency.Decision { panic("reconciler") }
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{
		CallMax: 10 * time.Second,
		Reconcile: func(context.Context, idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
			asked++
			return answer(), nil
		},
	}, []idempotency.Phase[payment]{calls(true, func(*step) error { return errAway }), ends("ship")})
	do(t, flow, "k", idempotency.ErrIndeterminate)
	reconcile := func(passed time.Duration, decided, calls int, problem string) {
		passes(t, pool, passed)
		got, err := flow.Reconcile(t.Context())
		require.Equal(t, []any{decided, calls, problem != ""}, []any{got, asked, err != nil}, "%v", err)
	}
	reconcile(0, 0, 0, "")
	reconcile(10*time.Second, 0, 1, "panic: reconciler")
	reconcile(0, 0, 1, "")
	answer = idempotency.Unknown
	reconcile(time.Hour, 0, 2, "")
	reconcile(0, 0, 2, "")
	taken := `UPDATE effectonce.idempotency_keys SET lock_token = lock_token + 1` // by a person, meanwhile: the decision does not count
	answer = func() idempotency.Decision {
		pgtest.Exec(t, pool, taken)
		return idempotency.DidNotHappen()
	}
	reconcile(time.Hour, 0, 3, "")
	taken = ""
	reconcile(time.Hour, 1, 4, "")
}

// Property: the reconciler of a flow is not called for indeterminate work in one transaction of the
// same operation: a key that it returned would run again, although its effect exists. And such work
// takes no key over from a flow, whose call may have been made. Row H5 of guarantees.md.
func TestReconcilerIsNotAskedAboutWork(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{})
	flow := newFlow(t, o, idempotency.FlowConfig[payment]{
		Reconcile: func(context.Context, idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
			return idempotency.DidNotHappen(), nil
		},
	}, []idempotency.Phase[payment]{calls(false, func(*step) error { return errAway }), ends("ship")})
	unknown := func(context.Context, pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{}, idempotency.Indeterminate(errAway)
	}
	once(t, o, "unknown", idempotency.ErrIndeterminate, unknown)
	do(t, flow, "of the flow", errAway)
	once(t, o, "of the flow", idempotency.ErrUnknownRecoveryPoint, unknown)
	passes(t, pool, time.Hour)
	reconciles(t, flow, 0)
}

// Property: a statement of a goroutine that outlives the work runs in no other transaction: nothing
// is committed.
func TestGoroutineLeftBehindCommitsNothing(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{WaitMax: time.Minute})
	over := make(chan struct{})
	_, err := o.Once(t.Context(), key("k"), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		if err := effect(ctx, tx, "k"); err != nil {
			return idempotency.Response{}, err
		}
		go func() {
			defer close(over)
			_, _ = tx.Exec(ctx, `SELECT pg_sleep(60) AS left_behind`) // it is cut off
		}()
		err := until(ctx, pool, `SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%left_behind' AND pid <> pg_backend_pid()`)
		return idempotency.Response{Status: 201}, err
	})
	require.ErrorContains(t, err, "two goroutines")
	testwait.Chan(t, "the statement is cut off", over)
	require.Zero(t, effects(t, pool, "k"))
	insert(t, o, "k")
	require.Equal(t, 1, effects(t, pool, "k"))
}

// Property: what the work changes of its session reaches no other request, whether it is committed or not.
func TestSessionsOfTheWorkAreNotUsedAgain(t *testing.T) {
	t.Parallel()
	pool := poolOf(t, newPool(t), 1)
	o := newOperation(t, pool, idempotency.Config{})
	flow := flowOf(t, pool, states("reserve", `SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY`), ends("flow"))
	for value, failure := range map[string]error{"committed": nil, "rolled back": errAway} {
		_, err := o.Once(t.Context(), key(value), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			_, err := tx.Exec(ctx, `SELECT pg_catalog.set_config('search_path', 'elsewhere', false)`)
			return idempotency.Response{Status: 201}, errors.Join(err, failure)
		})
		require.Equal(t, failure == nil, err == nil, err)
		insert(t, o, "after "+value)
	}
	do(t, flow, "k", nil)
	require.Equal(t, 1, effects(t, pool, "flow"))
}

// Property: work may act as another role, for row-level security; what is stored about the key is not
// written as that role, and the next request does not act as it.
func TestRoleOfTheWorkEndsWithIt(t *testing.T) {
	t.Parallel()
	wide := newPool(t)
	role := pgtest.RolePrefix(t, wide.Config().ConnString()) + "_tenant"
	pgtest.Exec(t, wide, `CREATE ROLE `+role+`; GRANT INSERT ON effects TO `+role)
	pool := poolOf(t, wide, 1)
	o := newOperation(t, pool, idempotency.Config{})
	flow := flowOf(t, pool, states("reserve", `SET LOCAL ROLE `+role), ends("flow"))
	for _, as := range []string{`SET LOCAL ROLE ` + role, `SELECT pg_catalog.set_config('role', '` + role + `', true)`, `SET ROLE ` + role} {
		once(t, o, as, nil, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			if _, err := tx.Exec(ctx, as); err != nil {
				return idempotency.Response{}, err
			}
			return insertOnce(as)(ctx, tx)
		})
		require.Equal(t, 1, effects(t, wide, as))
		who := pgtest.Value[string](t, pool, `SELECT current_user`)
		require.NotEqual(t, role, who, as)
	}
	do(t, flow, "k", nil)
	require.Equal(t, 1, effects(t, wide, "flow"))
}

// Property: a phase that panics, or ends its goroutine, frees its key at once: the next request
// continues there, however long the lock is. If its call must not be repeated, the key is in doubt
// at once. A panic is an error, and no outcome of a strict operation. Rows H1, H5 of guarantees.md.
func TestPhaseThatDoesNotReturnFreesItsLock(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	for value, c := range map[string]struct{ panics, inWrite, once bool }{
		"panic in a call": {true, false, false}, "goexit in a call, once": {false, false, true}, "panic in a write, once": {true, true, true}, "goexit in a write": {false, true, false},
	} {
		dies := true
		die := func(inWrite bool) {
			switch {
			case !dies || c.inWrite != inWrite:
			case c.panics:
				panic("nil map")
			default:
				runtime.Goexit()
			}
		}
		phase := ends(value)
		phase.AtMostOnce, phase.Call = c.once, func(context.Context, *step) error { die(false); return nil }
		write := phase.Write
		phase.Write = func(ctx context.Context, tx pgx.Tx, s *step) error {
			err := write(ctx, tx, s)
			die(true)
			return err
		}
		flow := newFlow(t, newOperation(t, pool, idempotency.Config{Lock: time.Hour, Strict: true}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{phase})
		_, err := flow.Do(t.Context(), key(value), nil)
		require.ErrorContains(t, err, map[bool]string{false: "ended its goroutine", true: "panic: nil map"}[c.panics])
		require.Zero(t, effects(t, pool, value))
		dies = false
		_, err = flow.Do(t.Context(), key(value), nil)
		require.Equal(t, c.once, errors.Is(err, idempotency.ErrIndeterminate), "%s: %v", value, err)
		require.Equal(t, map[bool]int{false: 1}[c.once], effects(t, pool, value))
	}
}

// Property: a call that happened, of a phase that could not finish the flow, makes its key one for a person
// again, who is told what is left to do.
func TestHappenedWithoutWriteIsForAPerson(t *testing.T) {
	t.Parallel()
	pool, asked := newPool(t), 0
	flow := flowOf(t, pool, idempotency.Phase[payment]{Name: "charge", AtMostOnce: true, Call: func(context.Context, *step) error { asked++; return errAway }})
	do(t, flow, "k", idempotency.ErrIndeterminate)
	pgtest.Exec(t, pool, `UPDATE effectonce.idempotency_keys SET state = 'running', call = 'happened', lock_token = lock_token + 1, retry_at = NULL`)
	_, err := flow.Do(t.Context(), key("k"), nil)
	require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	require.ErrorContains(t, err, "keys finish")
	require.Equal(t, 1, asked)
	require.Equal(t, "indeterminate", stateOf(t, pool, "k"))
}

// Property: errors about the key of another operation, which the work used, do not apply to this
// operation's key: no client learns that it should take another key, or that nothing was done, and
// nothing is done again while the request waits.
func TestVerdictsOfOtherKeysAreNotThisOnes(t *testing.T) {
	t.Parallel()
	pool, asked := newPool(t), 0
	o := newOperation(t, pool, idempotency.Config{})
	verdicts := []error{
		idempotency.ErrMismatch, idempotency.ErrInProgress, idempotency.ErrAbandoned, idempotency.ErrLockLost, idempotency.ErrUnknownRecoveryPoint,
		idempotency.ErrUnanswered, idempotency.ErrInvalid, &pgconn.PgError{Code: "EO003"},
	}
	for n, inner := range verdicts {
		flow := flowOf(t, pool, calls(false, func(*step) error {
			asked++
			return fmt.Errorf("the other operation: %w", inner)
		}), ends("ship"))
		_, phases := flow.Do(t.Context(), key(fmt.Sprint("flow ", n)), nil)
		_, once := o.Once(t.Context(), key(fmt.Sprint("once ", n)), func(context.Context, pgx.Tx) (idempotency.Response, error) { return idempotency.Response{}, inner })
		for _, got := range []error{phases, once} {
			require.ErrorContains(t, got, inner.Error())
			for _, verdict := range verdicts[:7] {
				require.NotErrorIs(t, got, verdict)
			}
		}
	}
	require.Len(t, verdicts, asked)
	require.Equal(t, asked, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'running' AND locked_until IS NULL`), "free at once")
}

// Property: of two holders of one token, as after a failover that lost a claim, the one that finds its
// phase done by the other stores no outcome: it has lost its lock.
func TestRowOfTheOtherHolderIsNoEarlierExecution(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	pgtest.Exec(t, pool, `CREATE TABLE orders (id uuid PRIMARY KEY)`)
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{
		{Name: "reserve", Write: func(ctx context.Context, tx pgx.Tx, s *step) error {
			if _, err := pool.Exec(ctx, `WITH other AS (INSERT INTO orders VALUES ($1)) SELECT effectonce.advance_key('tenant', 'order', 'k', lock_token, 'reserve', '{}') FROM effectonce.idempotency_keys`, s.ChildID()); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, `INSERT INTO orders VALUES ($1) ON CONFLICT DO NOTHING`, s.ChildID())
			return errors.Join(err, idempotency.ErrExpired) // which it takes the row for
		}}, ends("ship"),
	})
	do(t, flow, "k", idempotency.ErrLockLost)
	require.Equal(t, "running", stateOf(t, pool, "k"))
}

// Property: a client that retries after the window gets the expired outcome only if no foreign
// system was called again; if one may have acted twice, a person decides. Row H33 of guarantees.md.
func TestExpiredBehindACallIsInDoubt(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	pgtest.Exec(t, pool, `CREATE TABLE orders (id uuid PRIMARY KEY)`)
	// By the phase that inserts under its child ID, and whether the call must not be repeated.
	for inserts, c := range map[string]struct {
		once  bool
		state string
		asked int
	}{
		"reserve": {false, "finished", 1}, "charge": {true, "indeterminate", 2}, "ship": {false, "indeterminate", 2},
	} {
		asked := 0
		phase := func(name string) idempotency.Phase[payment] {
			return idempotency.Phase[payment]{Name: name, Write: func(ctx context.Context, tx pgx.Tx, s *step) error {
				if name == "ship" {
					s.Finish(idempotency.Response{Status: 201})
				}
				if name != inserts {
					return nil
				}
				tag, err := tx.Exec(ctx, `INSERT INTO orders VALUES ($1) ON CONFLICT DO NOTHING`, s.ChildID())
				if err == nil && tag.RowsAffected() == 0 {
					err = idempotency.ErrExpired
				}
				return err
			}}
		}
		charge := phase("charge")
		charge.AtMostOnce, charge.Call = c.once, func(context.Context, *step) error { asked++; return nil }
		flow := flowOf(t, pool, phase("reserve"), charge, phase("ship"))
		do(t, flow, inserts, nil)
		_, err := pool.Exec(t.Context(), `DELETE FROM effectonce.idempotency_keys`) // the window is over
		require.NoError(t, err)
		response, err := flow.Do(t.Context(), key(inserts), nil)
		require.Equal(t, c.asked, asked)
		require.Equal(t, c.state, stateOf(t, pool, inserts))
		require.Equal(t, c.state == "indeterminate", errors.Is(err, idempotency.ErrIndeterminate))
		require.Equal(t, c.state == "finished", response.Status == 410)
	}
}

// Property: a call that happened is not made again, and what its phase writes and the phases behind it
// is not left out: the reconciler, or a person, continues the flow. An outcome that would leave it out is
// refused, and so is a continuation that could not end. Row H5.
func TestFlowContinuesBehindACallThatHappened(t *testing.T) {
	t.Parallel()
	for name, seal := range map[string]idempotency.Sealer{"plain": nil, "sealed": newSealer(t, "old", "old")} {
		pool, asked, decision := newPool(t), 0, idempotency.Unknown()
		transfer := func(last bool) *idempotency.Flow[payment] {
			phases := []idempotency.Phase[payment]{
				{Name: "reserve", Write: func(ctx context.Context, tx pgx.Tx, _ *step) error { return effect(ctx, tx, "reserve") }},
				{Name: "transfer", AtMostOnce: true, Call: func(context.Context, *step) error { asked++; return errSilent }},
			}
			if !last {
				phases[1].Write = func(ctx context.Context, tx pgx.Tx, s *step) error { return effect(ctx, tx, "paid by "+s.State.Charge) }
				phases = append(phases, ends("receipt"))
				write := phases[2].Write
				phases[2].Write = func(ctx context.Context, tx pgx.Tx, s *step) error {
					if s.Attempt == 1 {
						return errAway
					}
					return write(ctx, tx, s)
				}
			}
			return newFlow(t, newOperation(t, pool, idempotency.Config{Seal: seal}), idempotency.FlowConfig[payment]{
				Reconcile: func(_ context.Context, u idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
					if u.Key.Value == "continues" {
						return u.Continue(payment{Charge: "ch_1"}), nil
					}
					return decision, nil
				},
			}, phases)
		}
		flow := transfer(false)
		do(t, flow, "continues", idempotency.ErrIndeterminate)
		decides := func(f *idempotency.Flow[payment], want int, problem string) {
			passes(t, pool, time.Hour)
			decided, err := f.Reconcile(t.Context())
			require.Equal(t, want, decided, name)
			if problem != "" {
				require.ErrorContains(t, err, problem)
			}
		}
		decides(flow, 1, "")
		do(t, flow, "continues", errAway)
		response, err := flow.Do(t.Context(), key("continues"), nil)
		require.NoError(t, err, name)
		require.Equal(t, 201, response.Status)
		require.Equal(t, []int{1, 1, 1, 1}, []int{asked, effects(t, pool, "reserve"), effects(t, pool, "paid by ch_1"), effects(t, pool, "receipt")})

		do(t, flow, "happened", idempotency.ErrIndeterminate)
		decision = idempotency.Happened(idempotency.Response{Status: 201})
		decides(flow, 0, "would be left out")
		decision = idempotency.UndecidedKey[payment]{}.Continue(payment{})
		decides(transfer(true), 0, "has no Write that could finish")
		decision = idempotency.Happened(idempotency.Response{Status: 201})
		decides(transfer(true), 1, "")
	}
}

// Property: what does not return when its time is over keeps neither its key nor a slot of the
// completer: another worker continues, and an AtMostOnce call is in doubt. Row H17.
func TestWhatDoesNotReturnIsLeftBehind(t *testing.T) {
	t.Parallel()
	never, pool := make(chan struct{}), newPool(t)
	defer close(never)
	for _, name := range []string{"call", "once", "write"} {
		var again atomic.Bool
		hangs := func() {
			if !again.Swap(true) {
				<-never
			}
		}
		phase := idempotency.Phase[payment]{Name: "charge", AtMostOnce: name == "once", Call: func(context.Context, *step) error { hangs(); return nil }}
		if name == "write" {
			phase.Call, phase.Write = nil, func(context.Context, pgx.Tx, *step) error { hangs(); return nil }
		}
		flow := newFlow(t, newOperation(t, pool, idempotency.Config{Lock: time.Minute}), idempotency.FlowConfig[payment]{CallMax: time.Second}, []idempotency.Phase[payment]{phase, ends("ship")})
		_, err := flow.Do(t.Context(), key(name), nil)
		require.ErrorContains(t, err, "left behind", name)
		require.Equal(t, phase.AtMostOnce, errors.Is(err, idempotency.ErrIndeterminate), name)
		_, err = flow.Do(t.Context(), key(name), nil)
		require.Equal(t, phase.AtMostOnce, err != nil, "%s: %v", name, err)
	}
}
