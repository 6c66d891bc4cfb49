package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// withDefault is a pool whose sessions have another default isolation.
func withDefault(t *testing.T, pool *pgxpool.Pool, level pgx.TxIsoLevel) *pgxpool.Pool {
	t.Helper()
	config := pool.Config()
	config.ConnConfig.RuntimeParams["default_transaction_isolation"] = string(level)
	other := pgtest.PoolOf(t, config)
	return other
}

// driven makes the request "k" while the test continues.
func driven(ctx context.Context, flow *idempotency.Flow[payment]) <-chan error {
	done := make(chan error, 1)
	go func() {
		_, err := flow.Do(ctx, key("k"), nil)
		done <- err
	}()
	return done
}

// holding is a transaction that ends with the test, at the latest.
func holding(t *testing.T, pool *pgxpool.Pool) pgx.Tx {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	return tx
}

// Property: if phases changed between deployments so that those which are done do not begin the
// list, this is detected, and nothing is run; phases added at the end are run. Row H17 of
// guarantees.md.
func TestChangedPhasesAreFoundOut(t *testing.T) {
	t.Parallel()
	pool, b := newPool(t), newBank(t)
	op := newOperation(t, pool, idempotency.Config{})
	b.refuse = 1
	whole := paymentPhases(b.URL, false)
	_, err := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, whole).Do(t.Context(), key("k"), []byte("100"))
	require.Error(t, err)
	renamed := append([]idempotency.Phase[payment]{{Name: "begin", Write: whole[0].Write}}, whole[1:]...)
	swapped := []idempotency.Phase[payment]{whole[1], whole[0], whole[2]}
	inserted := append([]idempotency.Phase[payment]{{Name: "check", Write: whole[0].Write}}, whole...)
	for name, phases := range map[string][]idempotency.Phase[payment]{"renamed": renamed, "swapped": swapped, "inserted": inserted, "shorter": whole[:1]} {
		_, err := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, phases).Do(t.Context(), key("k"), []byte("100"))
		require.ErrorIs(t, err, idempotency.ErrUnknownRecoveryPoint, name)
	}
	require.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM effects`))
	// Once does not take a key that was begun in phases.
	once(t, op, "k", idempotency.ErrUnknownRecoveryPoint, insertOnce("k"))
	added := append(whole[:2:2], idempotency.Phase[payment]{Name: "audit", Write: func(ctx context.Context, tx pgx.Tx, _ *idempotency.Step[payment]) error {
		return effect(ctx, tx, "audit k")
	}}, whole[2])
	_, err = newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, added).Do(t.Context(), key("k"), []byte("100"))
	require.NoError(t, err)
	require.Equal(t, 4, pgtest.Count(t, pool, `SELECT count(*) FROM effects`))
}

// Property: a context that ends stops a flow between two phases, with its key free, and it can be
// resumed, even if it is strict; a call that must not be repeated, and the writes of a phase, are not
// interrupted, so that nothing is in doubt. Rows H18, H19 of guarantees.md.
func TestCancelledFlowCanBeResumed(t *testing.T) {
	t.Parallel()
	points := []string{crashpoint.KeyClaimed, crashpoint.KeyWorked, crashpoint.KeyAdvanced, crashpoint.KeyCalling, crashpoint.KeyCalled, crashpoint.KeyCommitting}
	for n, at := range slices.Concat(points, points) {
		atMostOnce := n < len(points)
		t.Run(fmt.Sprint(at, ", at most once ", atMostOnce), func(t *testing.T) {
			t.Parallel()
			pool, b := newPool(t), newBank(t)
			flow := newFlow(t, newOperation(t, pool, idempotency.Config{Lock: time.Hour, Strict: true}), idempotency.FlowConfig[payment]{}, paymentPhases(b.URL, atMostOnce))
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			_, err := flow.Do(crashpoint.With(ctx, func(name string) {
				if name == at {
					cancel()
				}
			}), key("k"), []byte("100"))
			require.ErrorIs(t, err, context.Canceled)
			require.NotErrorIs(t, err, idempotency.ErrIndeterminate)
			requirePaidOnce(t, pool, b)
		})
	}
}

// Property: a worker that takes a key over continues from the key's current state, not from the
// state that it read before: the earlier holder, whose lock expired, may have made a call in
// between that must not be repeated. Row H2 of guarantees.md.
func TestTakeoverGoesOnFromWhatIsDone(t *testing.T) {
	t.Parallel()
	for meanwhile, sql := range map[string]string{
		"the phase is done": `SELECT effectonce.advance_key('tenant', 'order', 'k', lock_token, 'charge', '{"Order": 7}') FROM effectonce.idempotency_keys`,
		"it was lost, and begun anew with another state": `UPDATE effectonce.idempotency_keys SET data = '{"Order": 7}'`,
	} {
		t.Run(meanwhile, func(t *testing.T) {
			t.Parallel()
			pool, made := newPool(t), 0
			var found payment
			ship := ends("ship")
			book := ship.Write
			ship.Write = func(ctx context.Context, tx pgx.Tx, s *step) error {
				found = s.State
				return book(ctx, tx, s)
			}
			flow := newFlow(t, newOperation(t, pool, idempotency.Config{WaitMax: time.Minute}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{
				calls(true, func(*step) error {
					if made++; made == 1 {
						return idempotency.NotDone(errAway)
					}
					return nil
				}), ship,
			})
			do(t, flow, "k", errAway)
			holder := holding(t, pool)
			_, err := holder.Exec(t.Context(), `SELECT FROM effectonce.idempotency_keys WHERE locked_until IS NULL AND phases = '{}' FOR UPDATE`)
			require.NoError(t, err)
			done := driven(t.Context(), flow)
			require.NoError(t, until(t.Context(), pool, somebodyWaits))
			_, err = holder.Exec(t.Context(), sql)
			require.NoError(t, err)
			require.NoError(t, holder.Commit(t.Context()))
			err = testwait.Chan(t, "the takeover", done)
			if meanwhile == "the phase is done" {
				require.Equal(t, 1, made, "the one that was not done")
			}
			require.NoError(t, err)
			require.EqualValues(t, 7, found.Order)
			require.Equal(t, 1, effects(t, pool, "ship"))
		})
	}
}

// Property: a flow whose last phase does not call Finish fails there, and commits nothing of that
// phase.
func TestFlowWithoutAResponse(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{{
		Name:  "a",
		Write: func(ctx context.Context, tx pgx.Tx, _ *idempotency.Step[payment]) error { return effect(ctx, tx, "a") },
	}})
	_, err := flow.Do(t.Context(), key("k"), nil)
	require.ErrorContains(t, err, "did not call Finish")
	require.Zero(t, effects(t, pool, "a"))
}

// Property: a lock is renewed while its work lasts, before it is over, and no other worker takes the
// key over. Row H23 of guarantees.md.
func TestLongWorkKeepsItsLock(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	op := newOperation(t, pool, idempotency.Config{Lock: 6 * time.Second, WaitMax: time.Millisecond}) // a renewal may be seconds late
	begun, over := make(chan struct{}, 10), make(chan struct{})
	flow := newFlow(t, op, idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{calls(false, func(*step) error {
		begun <- struct{}{}
		testwait.Chan(t, "the work ends", over)
		return nil
	}), ends("ship")})
	done := driven(t.Context(), flow)
	testwait.Chan(t, "the work begins", begun)
	first := pgtest.Value[time.Time](t, pool, `SELECT locked_until FROM effectonce.idempotency_keys`)
	testwait.Equal(t, 1, "a renewal", func() int {
		return pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE locked_until > $1`, first)
	})
	do(t, flow, "k", idempotency.ErrInProgress)
	close(over)
	require.NoError(t, testwait.Chan(t, "the flow ends", done))
	require.Empty(t, begun)
	require.Equal(t, 1, effects(t, pool, "ship"))
}

// Property: when a transaction is retried after a serialization failure, its changes to the state are
// gone, and what the call before it decided stays: a flow that the call finished runs no other phase.
// Row H20 of guarantees.md.
func TestStateIsOfTheTransactionThatCommitted(t *testing.T) {
	t.Parallel()
	pool, runs, state := newPool(t), 0, int64(0)
	declined := calls(false, func(s *step) error {
		s.State.Order += 10
		s.Finish(idempotency.Response{Status: 402})
		return nil
	})
	declined.Write = func(ctx context.Context, tx pgx.Tx, s *step) error {
		s.State.Order++
		if runs++; runs < 3 {
			return &pgconn.PgError{Code: "40001"}
		}
		state = s.State.Order
		return effect(ctx, tx, "declined")
	}
	flow := flowOf(t, pool, declined, ends("ship"))
	response := do(t, flow, "k", nil)
	require.Equal(t, []any{402, int64(11), 1, 0}, []any{response.Status, state, effects(t, pool, "declined"), effects(t, pool, "ship")})
}

// Property: a renewal that hangs does not cost the lock: the next one comes before it is over, by
// the database's clock. Row H23 of guarantees.md.
func TestHangingRenewalDoesNotCostTheLock(t *testing.T) {
	longtest.Only(t, "a lock of real seconds")
	t.Parallel()
	wide := newPool(t)
	pgtest.Exec(t, wide, `CREATE TABLE renewals (late boolean NOT NULL);
		CREATE FUNCTION renewed() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO renewals VALUES (OLD.locked_until <= clock_timestamp()); RETURN NULL; END $$;
		CREATE TRIGGER renewed AFTER UPDATE ON effectonce.idempotency_keys FOR EACH ROW WHEN (NEW.locked_until > OLD.locked_until) EXECUTE FUNCTION renewed()`)
	var hang atomic.Bool
	config := wide.Config()
	config.PrepareConn = func(ctx context.Context, _ *pgx.Conn) (bool, error) {
		if hang.CompareAndSwap(true, false) {
			<-ctx.Done()
		}
		return true, ctx.Err()
	}
	pool := pgtest.PoolOf(t, config)
	called, renewed := make(chan struct{}), make(chan struct{})
	op := newOperation(t, pool, idempotency.Config{Lock: 15 * time.Second}) // so that a renewal in time may be seconds late
	flow := newFlow(t, op, idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{{
		Name: "long",
		Call: func(ctx context.Context, s *step) error {
			if _, err := wide.Exec(ctx, "TRUNCATE renewals"); err != nil { // the record of the call renewed the lock, too
				return err
			}
			hang.Store(true)
			close(called)
			s.Finish(idempotency.Response{Status: 200})
			select {
			case <-renewed:
			case <-ctx.Done():
			}
			return ctx.Err()
		},
	}})
	done := driven(t.Context(), flow)
	testwait.Chan(t, "the call", called)
	testwait.True(t, "a renewal", func() bool { return pgtest.Count(t, wide, `SELECT count(*) FROM renewals`) > 0 })
	close(renewed)
	require.NoError(t, testwait.Chan(t, "the flow ends", done))
	require.False(t, hang.Load())
	require.Zero(t, pgtest.Count(t, wide, `SELECT count(*) FROM renewals WHERE late`))
}

// Property: if a holder's write conflicts with another one of the row, it writes after that one,
// whatever the role's default isolation is: the key is released at once.
func TestHoldersWriteWaitsForOthers(t *testing.T) {
	t.Parallel()
	wide := newPool(t)
	other := holding(t, wide)
	var group sync.WaitGroup
	op := newOperation(t, withDefault(t, wide, pgx.RepeatableRead), idempotency.Config{Lock: time.Hour})
	flow := newFlow(t, op, idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{calls(false, func(*step) error {
		_, err := other.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET retry_at = clock_timestamp()`)
		group.Go(func() {
			assert.NoError(t, errors.Join(until(t.Context(), wide, somebodyWaits), other.Commit(t.Context())))
		})
		return errors.Join(err, errAway)
	}), ends("ship")})
	_, err := flow.Do(t.Context(), key("k"), nil)
	group.Wait()
	require.ErrorIs(t, err, errAway)
	require.NotContains(t, err.Error(), "release the lock")
	require.Equal(t, 1, pgtest.Count(t, wide, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'running' AND locked_until IS NULL`))
}

// Property: each statement of a holder checks the token: right after another worker took the key
// over, none changes the key, and no phase commits. Row H2 of guarantees.md.
func TestEveryWriteOfAHolderChecksTheToken(t *testing.T) {
	t.Parallel()
	type moment func(ctx context.Context) error // the key is taken over
	finish := func(s *step) { s.Finish(idempotency.Response{Status: 201}) }
	inCall := func(atMostOnce bool, then func(ctx context.Context) error) func(moment) idempotency.Phase[payment] {
		return func(taken moment) idempotency.Phase[payment] {
			return idempotency.Phase[payment]{Name: "all", AtMostOnce: atMostOnce, Call: func(ctx context.Context, _ *step) error {
				if err := taken(ctx); err != nil {
					return err
				}
				return then(ctx)
			}, Write: func(ctx context.Context, tx pgx.Tx, s *step) error { finish(s); return effect(ctx, tx, "all") }}
		}
	}
	inWrite := func(then func(s *step)) func(moment) idempotency.Phase[payment] {
		return func(taken moment) idempotency.Phase[payment] {
			return idempotency.Phase[payment]{Name: "all", Write: func(ctx context.Context, tx pgx.Tx, s *step) error {
				then(s)
				return errors.Join(taken(ctx), effect(ctx, tx, "all"))
			}}
		}
	}
	called := errors.New("the call was made")
	for name, c := range map[string]struct {
		phase   func(moment) idempotency.Phase[payment]
		claimed bool // it is taken over right after the claim
		lock    time.Duration
		want    error
	}{
		"idempotency.advance": {phase: inWrite(func(*step) {}), want: idempotency.ErrLockLost},
		"idempotency.finish":  {phase: inWrite(finish), want: idempotency.ErrLockLost},
		"idempotency.finish, without effects": {phase: inCall(false, func(context.Context) error {
			return idempotency.Final(idempotency.Response{Status: 402}, errAway)
		}), want: idempotency.ErrLockLost},
		"idempotency.calling": {phase: func(moment) idempotency.Phase[payment] {
			return calls(true, func(*step) error { return called })
		}, claimed: true, want: idempotency.ErrLockLost},
		"idempotency.undecided": {phase: inCall(true, func(context.Context) error { return idempotency.Indeterminate(errAway) }), want: errAway},
		"idempotency.unlock":    {phase: inCall(false, func(context.Context) error { return errAway }), want: errAway},
		"idempotency.renew": {phase: inCall(false, func(ctx context.Context) error {
			<-ctx.Done() // at the next renewal, or when CallMax is over
			return context.Cause(ctx)
		}), lock: time.Second, want: idempotency.ErrLockLost},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, heirs := newPool(t), ""
			const row = `SELECT k::text FROM effectonce.idempotency_keys k`
			taken := func(ctx context.Context) error {
				if _, err := pool.Exec(ctx, `UPDATE effectonce.idempotency_keys SET lock_token = lock_token + 1, attempts = attempts + 1,
					locked_by = 'heir', locked_until = clock_timestamp() + interval '1 hour'`); err != nil {
					return err
				}
				return pool.QueryRow(ctx, row).Scan(&heirs)
			}
			flow := newFlow(t, newOperation(t, pool, idempotency.Config{Lock: c.lock}), idempotency.FlowConfig[payment]{},
				[]idempotency.Phase[payment]{c.phase(taken), ends("ship")})
			_, err := flow.Do(crashpoint.With(t.Context(), func(point string) {
				if c.claimed && point == crashpoint.KeyClaimed {
					require.NoError(t, taken(t.Context()))
				}
			}), key("k"), nil)
			require.ErrorIs(t, err, c.want)
			require.NotErrorIs(t, err, called)
			require.NotEmpty(t, heirs)
			now := pgtest.Value[string](t, pool, row)
			require.Equal(t, heirs, now, "the key is the heir's")
			require.Zero(t, pgtest.Count(t, pool, `SELECT count(*) FROM effects`))
		})
	}
}

// Property: a holder that was frozen until its key was finished by another one, forgotten, and claimed
// again by a later request commits nothing: no two claims of a key have one token, also where the row
// of the first one is gone. The same holds where a failover lost the first claim.
func TestTokenOfAForgottenClaimIsNoLaterOnes(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	flow := func() *idempotency.Flow[payment] { // of another process
		return flowOf(t, pool, ends("ship"))
	}
	claimed, frozen, later := make(chan struct{}), make(chan struct{}), (<-chan error)(nil)
	first := crashpoint.With(t.Context(), func(point string) {
		if point != crashpoint.KeyClaimed {
			return
		}
		pgtest.Exec(t, pool, `DELETE FROM effectonce.idempotency_keys`)
		second := crashpoint.With(t.Context(), func(point string) {
			if point == crashpoint.KeyClaimed {
				close(claimed)
				<-frozen
			}
		})
		later = driven(second, flow())
		<-claimed
	})
	_, err := flow().Do(first, key("k"), nil)
	close(frozen)
	require.ErrorIs(t, err, idempotency.ErrLockLost)
	require.NoError(t, <-later)
	require.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM effects`))
}
