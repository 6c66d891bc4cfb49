package idempotency_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Property: every statement for one key finds it by the primary key, even if the table is empty
// when the plans are made: no partial index over all keys in a state is scanned, nor the table.
func TestKeysAreFoundByThePrimaryKey(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	_, err := pool.Exec(t.Context(), `ALTER TABLE effectonce.idempotency_keys SET (autovacuum_enabled = false)`)
	require.NoError(t, err)
	scans := func() (primary, partial, sequential int) {
		pool.Reset() // sessions that end say what they did
		require.Eventually(t, func() bool {
			return count(t, pool, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'`) == 0
		}, 2*time.Minute, 10*time.Millisecond)
		err := pool.QueryRow(t.Context(), `SELECT coalesce(sum(i.idx_scan) FILTER (WHERE indexrelname LIKE '%pkey'), 0), coalesce(sum(i.idx_scan) FILTER (WHERE indexrelname NOT LIKE '%pkey'), 0),
			(SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'idempotency_keys') FROM pg_stat_user_indexes i WHERE relname = 'idempotency_keys'`).Scan(&primary, &partial, &sequential)
		require.NoError(t, err)
		return primary, partial, sequential
	}
	_, partial, sequential := scans()

	plain, bounded := newOperation(t, pool, idempotency.Config{Lock: time.Second}), newOperation(t, pool, idempotency.Config{AttemptsMax: 5})
	refuse := func(context.Context, pgx.Tx) (idempotency.Response, error) { return idempotency.Response{}, errAway }
	doubt := func(context.Context, pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{}, idempotency.Indeterminate(errAway)
	}
	fail := true
	flow := newFlow(t, plain, idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{
		{Name: "reserve", Write: func(context.Context, pgx.Tx, *step) error { return nil }},
		calls(true, func(*step) error {
			if fail {
				return idempotency.NotDone(errAway)
			}
			return nil
		}), ends("ship"),
	})
	lost := newFlow(t, newOperation(t, pool, idempotency.Config{Lock: time.Second}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{calls(true, func(*step) error { return errAway }), ends("ship")})
	for n := range 10 {
		for range 2 {
			_, err := plain.Once(t.Context(), key(fmt.Sprint("once ", n)), insertOnce("once"))
			require.NoError(t, err)
			_, err = plain.Once(t.Context(), key(fmt.Sprint("doubt ", n)), doubt)
			require.ErrorIs(t, err, idempotency.ErrIndeterminate)
			_, err = lost.Do(t.Context(), key(fmt.Sprint("lost ", n)), nil)
			require.ErrorIs(t, err, idempotency.ErrIndeterminate)
			_, err = plain.Once(t.Context(), key(fmt.Sprint("own commit ", n)), committed)
			require.ErrorIs(t, err, idempotency.ErrIndeterminate)
		}
		_, err := bounded.Once(t.Context(), key(fmt.Sprint("bounded ", n)), refuse)
		require.ErrorIs(t, err, errAway)
		_, err = bounded.Once(t.Context(), key(fmt.Sprint("bounded ", n)), insertOnce("bounded"))
		require.NoError(t, err)
		fail = true
		_, err = flow.Do(t.Context(), key(fmt.Sprint("flow ", n)), nil)
		require.ErrorIs(t, err, errAway)
		fail = false
		_, err = flow.Do(t.Context(), key(fmt.Sprint("flow ", n)), nil)
		require.NoError(t, err)
	}
	primary, partialAfter, sequentialAfter := scans()
	require.Greater(t, primary, 200)
	require.Equal(t, partial, partialAfter, "partial indexes")
	require.Equal(t, sequential, sequentialAfter, "the whole table")
}
