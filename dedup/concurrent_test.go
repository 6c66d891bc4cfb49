package dedup_test

import (
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// newPool returns a pool of at most that many connections, with settings of the session.
func newPool(t *testing.T, address string, conns int32, settings ...string) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(address)
	require.NoError(t, err)
	config.MaxConns = conns
	for pair := range slices.Chunk(settings, 2) {
		config.ConnConfig.RuntimeParams[pair[0]] = pair[1]
	}
	return pgtest.PoolOf(t, config)
}

// C4: a claim waits for the transaction that holds it, and for no other; a claim of another ID or
// by another consumer does not wait.
func TestClaimWaitsForItsHolderOnly(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	ids := newIDs(t, 3)
	holder, holderPID := begin(t, pool, pgx.TxOptions{})
	other, _ := begin(t, pool, pgx.TxOptions{})
	waiter, waiterPID := begin(t, pool, pgx.TxOptions{})
	_, err := claims.ClaimBatch(t.Context(), holder, dedup.Numbered(1), messages(ids[:2]))
	require.NoError(t, err)

	exec(t, other, "SET LOCAL lock_timeout = '5s'")
	assert.True(t, claim(t, claims, other, dedup.Numbered(1), ids[2]), "another ID does not wait")
	assert.True(t, claim(t, claims, other, dedup.Numbered(2), ids[0]), "another consumer does not wait")

	answers := claimInBackground(t, claims, waiter, ids[1])
	waitUntilBlocked(t, pool, waiterPID, holderPID)
	require.NoError(t, holder.Rollback(t.Context()))
	assert.Equal(t, answer{fresh: true}, <-answers)
}

func requireOneOfTwo(t *testing.T, answers <-chan answer) {
	t.Helper()
	a, b := <-answers, <-answers
	require.NoError(t, a.err)
	require.NoError(t, b.err)
	require.NotEqual(t, a.fresh, b.fresh, "one batch is fresh and the other one is not")
}

// C5: under REPEATABLE READ and SERIALIZABLE, PostgreSQL reports a claim that the snapshot does not
// show yet as a serialization failure, not as a duplicate. It is ErrRetry, and a new transaction
// sees the duplicate.
func TestConflictBeyondTheSnapshotIsForRetry(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool, claims := pgtest.Pool(t), newClaims(t)
			opts := pgx.TxOptions{IsoLevel: level}
			ids := newIDs(t, 4)

			// A claim that was committed before the snapshot is an ordinary duplicate.
			claimAlone(t, pool, claims, dedup.Numbered(1), ids[0])
			tx, _ := begin(t, pool, opts)
			assert.False(t, claim(t, claims, tx, dedup.Numbered(1), ids[0]))

			// A claim that was committed after it is not.
			claimAlone(t, pool, claims, dedup.Numbered(1), ids[1])
			_, err := claims.Claim(t.Context(), tx, dedup.Numbered(1), ids[1], 0)
			requireRetry(t, err, "40001")
			require.NoError(t, tx.Rollback(t.Context()))
			assert.Equal(t, []bool{false}, claimIn(t, pool, opts, claims, dedup.Numbered(1), ids[1]))

			// Nor is a claim that was open when this one conflicted with it, and then committed.
			holder, tx, answers := contested(t, pool, claims, opts, ids[2])
			require.NoError(t, holder.Commit(t.Context()))
			requireRetry(t, (<-answers).err, "40001")
			require.NoError(t, tx.Rollback(t.Context()))
			assert.Equal(t, []bool{false}, claimIn(t, pool, opts, claims, dedup.Numbered(1), ids[2]))

			// After a rollback there is nothing to conflict with.
			holder, tx, answers = contested(t, pool, claims, opts, ids[3])
			require.NoError(t, holder.Rollback(t.Context()))
			assert.Equal(t, answer{fresh: true}, <-answers)
			require.NoError(t, tx.Commit(t.Context()))
			assert.Equal(t, []bool{false}, claimIn(t, pool, opts, claims, dedup.Numbered(1), ids[3]))
		})
	}
}

func requireRetry(t *testing.T, err error, code string) {
	t.Helper()
	require.ErrorIs(t, err, dedup.ErrRetry)
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, code, pgErr.Code)
}

// A lock timeout is ErrRetry: a new transaction may get the claim.
func TestLockTimeoutIsForRetry(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	id := newIDs(t, 1)[0]
	holder, _ := begin(t, pool, pgx.TxOptions{})
	claim(t, claims, holder, dedup.Numbered(1), id)

	tx, _ := begin(t, pool, pgx.TxOptions{})
	exec(t, tx, "SET LOCAL lock_timeout = '1ms'")
	_, err := claims.Claim(t.Context(), tx, dedup.Numbered(1), id, 0)
	requireRetry(t, err, "55P03")
	require.NoError(t, holder.Rollback(t.Context()))
	require.NoError(t, tx.Rollback(t.Context()))
	assert.Equal(t, []bool{true}, claimAlone(t, pool, claims, dedup.Numbered(1), id))
}

// beforeSQL calls a function once, before the first statement with a text is sent.
func beforeSQL(text string, call func()) pgtest.Statements {
	var once sync.Once
	return func(sql string) {
		if strings.Contains(sql, text) {
			once.Do(call)
		}
	}
}

// Property: a claim that is made in an old day between the look that found the day empty and the
// lock on the table keeps its day. C29.
func TestClaimBeforeTheLockKeepsItsDay(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	consumer := registered(t, pool, claims, dedup.Registration{Name: "c", Group: "g", Window: time.Minute})
	late := idAt(time.Now().AddDate(0, 0, -3))
	config := pool.Config()
	config.ConnConfig.Tracer = beforeSQL("LOCK TABLE ONLY", func() {
		require.Equal(t, []bool{true}, claimAlone(t, pool, claims, consumer, late))
	})
	traced := pgtest.PoolOf(t, config)
	day := "processed_messages_" + time.Now().UTC().AddDate(0, 0, -3).Format("20060102")
	require.Zero(t, pgtest.Count(t, pool, partitionOfSQL, late, "past"))

	report := maintain(t, traced, claims)
	require.NotEmpty(t, report.Dropped, "older days are dropped")
	require.NotContains(t, report.Dropped, day)
	require.Equal(t, []bool{false}, claimAlone(t, pool, claims, consumer, late), "the claim is there")
}
