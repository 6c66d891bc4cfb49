package dedup_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// fenceAlone fences in its own transaction, which commits unless there is an error.
func fenceAlone(t *testing.T, pool *pgxpool.Pool, claims *dedup.Claims, resource string, version int64) (applied bool) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) (err error) {
		applied, err = claims.Fence(t.Context(), tx, "orders", resource, version)
		return err
	}))
	return applied
}

// C47: an older or equal version is not applied, a newer one is. Neither scopes nor resources see each
// other.
func TestOnlyNewerVersionsAreApplied(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	for _, step := range []struct {
		version int64
		applied bool
	}{{7, true}, {6, false}, {7, false}, {8, true}, {math.MaxInt64, true}, {0, false}} {
		require.Equal(t, step.applied, fenceAlone(t, pool, claims, "order-1", step.version), "version %d", step.version)
	}
	require.EqualValues(t, math.MaxInt64, pgtest.Value[int64](t, pool, `SELECT version FROM effectonce.fences WHERE scope = 'orders' AND resource = 'order-1'`))
	tx, _ := begin(t, pool, pgx.TxOptions{})
	for _, other := range [][2]string{{"orders", "order-2"}, {"refunds", "order-1"}} {
		applied, err := claims.Fence(t.Context(), tx, other[0], other[1], 0)
		require.NoError(t, err)
		require.True(t, applied)
	}
}

// A version waits for the open transaction that holds its resource, or inserts it, and is then
// compared with the result of that transaction.
func TestVersionWaitsForTheOpenOne(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	for i, tc := range []struct {
		commit, applied bool
	}{{true, false}, {false, true}} {
		resource := fmt.Sprint("order-", i)
		holder, holderPID := begin(t, pool, pgx.TxOptions{})
		_, err := claims.Fence(t.Context(), holder, "orders", resource, 7)
		require.NoError(t, err)
		waiter, pid := begin(t, pool, pgx.TxOptions{})
		results := make(chan bool, 1)
		go func() {
			result, err := claims.Fence(t.Context(), waiter, "orders", resource, 5)
			assert.NoError(t, err)
			results <- result
		}()
		waitUntilBlocked(t, pool, pid, holderPID)
		if tc.commit {
			require.NoError(t, holder.Commit(t.Context()))
		} else {
			require.NoError(t, holder.Rollback(t.Context()))
		}
		require.Equal(t, tc.applied, <-results)
		require.NoError(t, waiter.Commit(t.Context()))
	}
}

// C5: under REPEATABLE READ and SERIALIZABLE a version that was stored after the snapshot is
// ErrRetry, and in the next transaction the result is stale.
func TestFenceBeyondTheSnapshotIsForRetry(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool, claims := pgtest.Pool(t), newClaims(t)
			for round, resource := range []string{"order-1", "order-1", "order-2"} { // inserted, updated, inserted
				tx, _ := begin(t, pool, pgx.TxOptions{IsoLevel: level})
				pgtest.Exec(t, tx, "SELECT FROM effectonce.fences")
				require.True(t, fenceAlone(t, pool, claims, resource, int64(10+round)))
				_, err := claims.Fence(t.Context(), tx, "orders", resource, 5)
				requireRetry(t, err, "40001")
				require.NoError(t, tx.Rollback(t.Context()))
				require.False(t, fenceAlone(t, pool, claims, resource, 5))
			}
		})
	}
}

// C25: what the server would refuse is refused before, and the transaction stays usable.
func TestBadVersionsNeverReachTheServer(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	tx, _ := begin(t, pool, pgx.TxOptions{})
	_, err := claims.Fence(t.Context(), tx, "a\x00b", "order-1", 1)
	require.ErrorIs(t, err, dedup.ErrFenceInvalid)
	for _, resource := range []string{"", "\xff", strings.Repeat("x", 1025)} {
		_, err = claims.Fence(t.Context(), tx, "orders", resource, 1)
		require.ErrorIs(t, err, dedup.ErrFenceInvalid)
	}
	_, err = claims.Fence(t.Context(), tx, "orders", "order-1", -1)
	require.ErrorIs(t, err, dedup.ErrFenceInvalid)
	_, err = claims.Fence(t.Context(), tx, strings.Repeat("x", 256), "order-1", 1)
	require.ErrorIs(t, err, dedup.ErrFenceInvalid)
	_, err = claims.Fence(t.Context(), tx, strings.Repeat("x", 255), strings.Repeat("ü", 512), 1)
	require.NoError(t, err, "the bounds of the table")

	_, err = dedup.New(dedup.Config{Schema: "No Schema"})
	require.ErrorContains(t, err, "schema ")
}
