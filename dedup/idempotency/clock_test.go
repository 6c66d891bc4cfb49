package idempotency_test

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/pgtest"
)

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
	return map[string]time.Duration{"two days behind": -48 * time.Hour, "as this one": 0, "two days ahead": 48 * time.Hour}
}

// single is a flow of one phase with a call.
func single(t *testing.T, pool *pgxpool.Pool, lock time.Duration, call func(ctx context.Context) error) *idempotency.Flow[int] {
	t.Helper()
	f, err := idempotency.NewFlow(newOperation(t, pool, idempotency.Config{Lock: lock, WaitMax: time.Millisecond}),
		idempotency.FlowConfig[int]{StoreRequest: true, RetryAfter: time.Minute}, idempotency.Phase[int]{
			Name: "all",
			Call: func(ctx context.Context, _ *idempotency.Step[int]) error { return call(ctx) },
			Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[int]) error {
				step.Finish(idempotency.Response{Status: 201})
				return effect(ctx, tx, step.Key.Value)
			},
		})
	require.NoError(t, err)
	return f
}

// Property: a dead worker's lock expires, a window ends and the completer retries by the database's
// clock, however wrong this process's clock is. Rows H1, H16 of guarantees.md.
func TestOnlyTheDatabasesClockCounts(t *testing.T) {
	t.Parallel()
	for name, off := range offs() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, pass := skewed(t, off)
			fails := atomic.Bool{}
			f := single(t, pool, 30*time.Second, func(context.Context) error {
				if fails.Load() {
					return errors.New("try again")
				}
				return nil
			})
			o := newOperation(t, pool, idempotency.Config{})
			died := make(chan struct{})
			go func() {
				defer close(died)
				_, _ = f.Do(crashpoint.With(t.Context(), func(string) { runtime.Goexit() }), key("a"), nil)
			}()
			<-died
			_, err := f.Do(t.Context(), key("a"), nil)
			var busy *idempotency.InProgressError
			require.ErrorAs(t, err, &busy)
			require.Greater(t, busy.RetryAfter, 15*time.Second)
			require.LessOrEqual(t, busy.RetryAfter, 30*time.Second)
			pass(31 * time.Second)
			_, err = f.Do(t.Context(), key("a"), nil)
			require.NoError(t, err)

			pass(23 * time.Hour)
			reaped, err := o.Reap(t.Context())
			require.NoError(t, err)
			require.Zero(t, reaped)
			again, err := f.Do(t.Context(), key("a"), nil)
			require.NoError(t, err)
			require.True(t, again.Replayed)
			require.Equal(t, 1, effects(t, pool, "a"))
			_, err = o.Once(t.Context(), key("once"), insertOnce("once"))
			require.NoError(t, err)
			pass(2 * time.Hour)
			reaped, err = o.Reap(t.Context())
			require.NoError(t, err)
			require.EqualValues(t, 1, reaped, "the flow's, not the one of two hours ago")
			pass(23 * time.Hour)
			reaped, err = o.Reap(t.Context())
			require.NoError(t, err)
			require.EqualValues(t, 1, reaped)

			fails.Store(true)
			_, err = f.Do(t.Context(), key("b"), []byte("request"))
			require.ErrorContains(t, err, "try again")
			fails.Store(false)
			finished, err := f.Complete(t.Context())
			require.NoError(t, err)
			require.Zero(t, finished)
			pass(61 * time.Second)
			finished, err = f.Complete(t.Context())
			require.NoError(t, err)
			require.Equal(t, 1, finished)
		})
	}
}

// Property: a holder that works for longer than its lock lasts keeps the lock, whatever the clocks
// show: no other worker takes over, and its outcome is stored. Rows H2, H23 of guarantees.md.
func TestRenewalsNeedNoCommonClock(t *testing.T) {
	t.Parallel()
	for name, off := range offs() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, _ := skewed(t, off)
			begun, end, done := make(chan struct{}, 10), make(chan struct{}), make(chan error, 1)
			const lock = 6 * time.Second // a renewal may be seconds late
			f := single(t, pool, lock, func(ctx context.Context) error {
				begun <- struct{}{}
				select {
				case <-end:
				case <-ctx.Done():
				}
				return ctx.Err()
			})
			go func() {
				_, err := f.Do(t.Context(), key("a"), nil)
				done <- err
			}()
			<-begun
			var first, now time.Time
			const until = `SELECT locked_until FROM effectonce.idempotency_keys`
			require.NoError(t, pool.QueryRow(t.Context(), until).Scan(&first))
			require.Eventually(t, func() bool { // for longer than the first lock
				_, err := f.Do(t.Context(), key("a"), nil)
				return errors.Is(err, idempotency.ErrInProgress) && pool.QueryRow(t.Context(), until).Scan(&now) == nil && now.Sub(first) > lock
			}, 2*time.Minute, 50*time.Millisecond)
			close(end)
			require.NoError(t, <-done)
			require.Empty(t, begun)
			require.Equal(t, 1, effects(t, pool, "a"))
		})
	}
}
