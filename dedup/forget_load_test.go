package dedup_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// overlapping claims messages of today in transactions of one second, of which at least one is open
// at any time, until the returned function is called. A claim that waits longer for a lock fails
// the test.
func overlapping(t *testing.T, pool *pgxpool.Pool, claims *dedup.Claims, consumer dedup.Consumer, wait time.Duration) (stop func()) {
	t.Helper()
	const lanes = 3
	var workers sync.WaitGroup
	done := make(chan struct{})
	opened := make(chan struct{}, lanes)
	one := func(seconds float64) error {
		return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), `SELECT set_config('lock_timeout', $1, true)`, fmt.Sprint(wait.Milliseconds())); err != nil {
				return err
			}
			fresh, err := claims.Claim(t.Context(), tx, consumer, idAt(time.Now()), 0)
			if err == nil && !fresh {
				err = errors.New("a new message is a duplicate")
			}
			if err != nil {
				return err
			}
			select {
			case opened <- struct{}{}:
			default:
			}
			_, err = tx.Exec(t.Context(), `SELECT pg_sleep($1)`, seconds)
			return err
		})
	}
	for lane := range lanes {
		workers.Go(func() {
			for seconds := 1 + float64(lane)/lanes; ; seconds = 1 { // the first one staggers them
				select {
				case <-done:
					return
				default:
				}
				if err := one(seconds); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range lanes {
		<-opened
	}
	var once sync.Once
	return func() { once.Do(func() { close(done); workers.Wait() }) }
}

// completeSQL checks that the lease is free, and whether a run was complete.
const completeSQL = `SELECT count(*) FROM effectonce.maintenance WHERE job = 'claims' AND lease_until IS NULL AND (done_at IS NOT NULL) = $1`

// Property: while transactions of a second overlap without a gap, one run forgets days and sweeps,
// and no claim waits for it. Work that needs the lock on the whole table is left until the table is
// quiet or the work is urgent. B15.
func TestOverlappingTransactionsDoNotKeepClaimsFromBeingForgotten(t *testing.T) {
	longtest.Only(t, "a lock has to be had within a second under load")
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	consumer := register(t, pool, claims, "c", time.Hour)
	away(t, pool, -20) // partitions for 20 more days
	claimAlone(t, pool, claims, consumer, idAt(noon(4)), idAt(noon(3)))
	pgtest.Exec(t, pool, `INSERT INTO effectonce.processed_messages SELECT effectonce.message_id('s', n::text), $1, 0,
		clock_timestamp() - interval '4 days' FROM generate_series(1, 1000) n`, consumer.ID())
	always := unquiet(t, pool) // also on a machine that is so busy that there are gaps
	// Far more than the 300 ms for which the work waits and the moment for which it holds its lock,
	// and less than the 2 s for which urgent work waits.
	stop := overlapping(t, pool, claims, consumer, 1500*time.Millisecond)
	defer stop()

	for range 3 {
		report := maintain(t, pool, claims)
		require.Empty(t, report.Made)
		require.Empty(t, report.Dropped)
		if report.Swept > 0 {
			require.Equal(t, []string{dayName(4), dayName(3)}, report.Truncated)
			require.EqualValues(t, 1000, report.Swept)
		}
	}
	require.Equal(t, endOf(3), mark(t, pool, consumer))
	require.Zero(t, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.processed_messages WHERE processed_at < clock_timestamp() - interval '2 days'`))
	require.Equal(t, 1, pgtest.Count(t, pool, completeSQL, true))
	stop()
	require.NoError(t, always.Rollback(t.Context()))
	report := maintain(t, pool, claims)
	require.Len(t, report.Made, 12, "it is quiet")
	require.Contains(t, report.Dropped, dayName(3))
}

// Property: when only a few days are left, a run waits for the lock for as long as transactions
// take. B15.
func TestMissingDaysAreMadeUnderOverlappingTransactions(t *testing.T) {
	longtest.Only(t, "transactions of eight seconds")
	t.Parallel()
	for _, left := range []int{5, 1, 0} {
		t.Run(fmt.Sprint(left), func(t *testing.T) {
			t.Parallel()
			pool, claims := pgtest.Pool(t), newClaims(t)
			consumer := register(t, pool, claims, "c", time.Hour)
			away(t, pool, -left)
			defer overlapping(t, pool, claims, consumer, 8*time.Second)()
			var report dedup.Report
			var err error
			for range 10 { // on a busy machine a second may take longer than the patience of a run
				if report, err = claims.Maintain(t.Context(), pool, dedup.MaintainOptions{Owner: "test"}); err == nil {
					break
				}
			}
			require.NoError(t, err)
			require.Len(t, report.Made, 32-left)
		})
	}
}

// Property: a run in which a step fails still runs the other steps, releases its lease and is not
// recorded as complete.
func TestStepsDoNotDependOnEachOther(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	consumer := register(t, pool, claims, "c", time.Hour)
	claimAlone(t, pool, claims, consumer, idAt(noon(4)), idAt(noon(3)))
	pgtest.Exec(t, pool, `INSERT INTO effectonce.processed_messages VALUES (effectonce.message_id('s', 'x'), $1, 0, clock_timestamp() - interval '4 days')`, consumer.ID())
	reader, _ := begin(t, pool, pgx.TxOptions{})
	pgtest.Exec(t, reader, `SELECT FROM effectonce.`+dayName(4))

	report, err := claims.Maintain(t.Context(), pool, dedup.MaintainOptions{Owner: "test"})
	require.ErrorContains(t, err, "forget days: "+dayName(4)+": lock conflict with running claims, the next run retries")
	require.Equal(t, []string{dayName(3)}, report.Truncated)
	require.EqualValues(t, 1, report.Swept)
	require.Contains(t, report.Dropped, dayName(5), "before the day that is kept")
	require.NotContains(t, report.Dropped, dayName(4))
	require.Equal(t, endOf(3), mark(t, pool, consumer), "of the day that was forgotten")
	require.Equal(t, 1, pgtest.Count(t, pool, completeSQL, false))
	require.NoError(t, reader.Rollback(t.Context()))
	require.Equal(t, []string{dayName(4)}, maintain(t, pool, claims).Truncated)
}

// Property: one process at a time maintains; a holder that died is replaced when its lease is over.
func TestOneMaintainerAtATime(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	pgtest.Exec(t, pool, `INSERT INTO effectonce.maintenance (job, owner, lease_until) VALUES ('claims', 'somebody', clock_timestamp() + interval '1 minute')`)
	report, err := claims.Maintain(t.Context(), pool, dedup.MaintainOptions{Owner: "test"})
	require.NoError(t, err)
	require.True(t, report.Elsewhere)
	pgtest.Exec(t, pool, `UPDATE effectonce.maintenance SET lease_until = clock_timestamp() - interval '1 ms' WHERE job = 'claims'`)
	maintain(t, pool, claims)
}
