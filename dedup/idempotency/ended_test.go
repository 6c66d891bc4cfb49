package idempotency_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Property: work that rolls its transaction back behind the library's back, and so loses the claim,
// is not a success, and as part of a phase does not move the recovery point.
func TestWorkThatEndedItsTransactionIsNoSuccess(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{})
	for value, end := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"comment":     func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Exec(ctx, "-- tidy up\nROLLBACK"); return err },
		"several":     func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Exec(ctx, "SELECT 1; ROLLBACK"); return err },
		"its own way": func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Conn().Exec(ctx, "ROLLBACK"); return err },
	} {
		work := func(ctx context.Context, tx pgx.Tx) error {
			if err := effect(ctx, tx, value); err != nil {
				return err
			}
			return end(ctx, tx)
		}
		_, err := o.Once(t.Context(), key(value), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			return idempotency.Response{Status: 201}, work(ctx, tx)
		})
		require.ErrorContains(t, err, "ended its transaction", value)
		flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{{Name: "all", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[payment]) error {
			step.Finish(idempotency.Response{Status: 201})
			return work(ctx, tx)
		}}})
		_, err = flow.Do(t.Context(), key("flow "+value), nil)
		require.ErrorContains(t, err, "ended its transaction", value)
	}
	require.Zero(t, count(t, pool, `SELECT count(*) FROM effects`))
	require.Zero(t, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'finished' OR phases <> '{}'`))
	_, err := o.Once(t.Context(), key("next"), insertOnce("next"))
	require.NoError(t, err, "the connection is in order")
}

// Property: what work commits behind the library's back exists once, and no client gets a success
// with an empty response.
func TestWorkThatCommittedByItselfIsInDoubt(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{})
	work := func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		if err := effect(ctx, tx, "k"); err != nil {
			return idempotency.Response{}, err
		}
		_, err := tx.Conn().Exec(ctx, "COMMIT")
		return idempotency.Response{Status: 201}, err
	}
	_, err := o.Once(t.Context(), key("k"), work)
	require.ErrorContains(t, err, "ended its transaction")
	require.ErrorIs(t, err, idempotency.ErrIndeterminate, "nobody is told that nothing was done")
	_, err = o.Once(t.Context(), key("k"), work)
	require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	require.Equal(t, 1, effects(t, pool, "k"))
}

// Property: a phase cannot commit by itself and then be run again; a transaction that the work
// begins instead does not count either.
func TestPhaseCannotCommitByItself(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	for value, sql := range map[string]string{"commit": "COMMIT", "commit and begin": "COMMIT; BEGIN", "begin anew": "ROLLBACK; BEGIN"} {
		own := func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Conn().Exec(ctx, sql)
			return errors.Join(err, effect(ctx, tx, "phase of "+value))
		}
		flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{{Name: "all", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[payment]) error {
			step.Finish(idempotency.Response{Status: 201})
			return errors.Join(effect(ctx, tx, "phase of "+value), own(ctx, tx))
		}}})
		_, err := flow.Do(t.Context(), key("flow "+value), nil)
		require.Error(t, err, value)
		require.Zero(t, effects(t, pool, "phase of "+value))
	}
}

// Property: what the work writes in a transaction that it began instead of its own is not
// committed, and it does not change the outcome that another request stored in between.
func TestTransactionThatTheWorkBeganDoesNotCount(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{})
	for value, meanwhile := range map[string]bool{"alone": false, "another request": true} {
		_, err := o.Once(t.Context(), key(value), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			_, err := tx.Conn().Exec(ctx, "ROLLBACK")
			if meanwhile {
				_, err := newOperation(t, pool, idempotency.Config{}).Once(ctx, key(value), insertOnce(value))
				require.NoError(t, err)
			}
			_, begin := tx.Conn().Exec(ctx, "BEGIN")
			return idempotency.Response{Status: 200}, errors.Join(err, begin, effect(ctx, tx, "lost"))
		})
		require.ErrorContains(t, err, "ended its transaction", value)
		response, err := o.Once(t.Context(), key(value), insertOnce(value))
		require.NoError(t, err)
		require.Equal(t, meanwhile, response.Replayed)
		require.Equal(t, 201, response.Status)
		require.Equal(t, 1, effects(t, pool, value))
	}
	require.Zero(t, effects(t, pool, "lost"))
}
