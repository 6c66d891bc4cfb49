package idempotency_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/crashpoint"
)

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
			var now string
			require.NoError(t, pool.QueryRow(t.Context(), row).Scan(&now))
			require.Equal(t, heirs, now, "the key is the heir's")
			require.Zero(t, count(t, pool, `SELECT count(*) FROM effects`))
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
		return newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{ends("ship")})
	}
	claimed, frozen, later := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	first := crashpoint.With(t.Context(), func(point string) {
		if point != crashpoint.KeyClaimed {
			return
		}
		_, err := pool.Exec(t.Context(), `DELETE FROM effectonce.idempotency_keys`)
		require.NoError(t, err)
		second := crashpoint.With(t.Context(), func(point string) {
			if point == crashpoint.KeyClaimed {
				close(claimed)
				<-frozen
			}
		})
		go func() {
			_, err := flow().Do(second, key("k"), nil)
			later <- err
		}()
		<-claimed
	})
	_, err := flow().Do(first, key("k"), nil)
	close(frozen)
	require.ErrorIs(t, err, idempotency.ErrLockLost)
	require.NoError(t, <-later)
	require.Equal(t, 1, count(t, pool, `SELECT count(*) FROM effects`))
}
