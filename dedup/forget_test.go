package dedup_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func register(t *testing.T, pool *pgxpool.Pool, claims *dedup.Claims, name string, window time.Duration) dedup.Consumer {
	t.Helper()
	consumer, err := claims.Register(t.Context(), pool, dedup.Registration{Name: name, Group: name, Window: window})
	require.NoError(t, err)
	return consumer
}

// noon returns noon of a past day, in UTC.
func noon(daysAgo int) time.Time {
	return time.Now().UTC().Truncate(24*time.Hour).AddDate(0, 0, -daysAgo).Add(12 * time.Hour)
}

func dayName(daysAgo int) string { return "processed_messages_" + noon(daysAgo).Format("20060102") }

// endOf returns the end of a past day.
func endOf(daysAgo int) time.Time { return noon(daysAgo).Add(12 * time.Hour) }

// mark returns the time up to which claims of a consumer may have been forgotten.
func mark(t *testing.T, pool *pgxpool.Pool, consumer dedup.Consumer) (at time.Time) {
	t.Helper()
	batch := &pgx.Batch{}
	newClaims(t).QueueForgotten(batch, consumer, &at, false)
	require.NoError(t, pool.SendBatch(t.Context(), batch).Close())
	return at.UTC()
}

// unquiet prevents a lock on the whole table, as any open transaction that claims does, until the
// test or the transaction ends.
func unquiet(t *testing.T, pool *pgxpool.Pool) pgx.Tx {
	t.Helper()
	tx, _ := begin(t, pool, pgx.TxOptions{})
	_, err := tx.Exec(t.Context(), "LOCK TABLE ONLY effectonce.processed_messages IN ACCESS SHARE MODE")
	require.NoError(t, err)
	return tx
}

// claimMarked claims one message and reads the mark after it, in one transaction.
func claimMarked(ctx context.Context, db interface {
	BeginTx(ctx context.Context, opts pgx.TxOptions) (pgx.Tx, error)
}, claims *dedup.Claims, consumer dedup.Consumer, id uuid.UUID, level pgx.TxIsoLevel,
) (fresh bool, at time.Time, err error) {
	err = pgx.BeginTxFunc(ctx, db, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
		fresh, at, err = claimMarkedIn(ctx, tx, claims, consumer, id, level != pgx.ReadCommitted)
		return err
	})
	return fresh, at, err
}

func claimMarkedIn(ctx context.Context, tx pgx.Tx, claims *dedup.Claims, consumer dedup.Consumer, id uuid.UUID, lock bool) (fresh bool, at time.Time, err error) {
	batch := &pgx.Batch{}
	claim := claims.Queue(batch, consumer, messages([]uuid.UUID{id}))
	claims.QueueForgotten(batch, consumer, &at, lock)
	if err := tx.SendBatch(ctx, batch).Close(); err != nil {
		return false, at, dedup.WrapClaimError(err)
	}
	return claim.Fresh()[0], at, nil
}

// Property: the mark of a consumer moves with the days in which it had claims, in the same
// transaction, to the end of the day, and never back; those of others stay. A new name has no mark.
// A2.
func TestMarkMovesWithTheDaysThatAreForgotten(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	a, b, idle := register(t, pool, claims, "a", time.Hour), register(t, pool, claims, "b", 48*time.Hour), register(t, pool, claims, "idle", time.Hour)
	ledger, err := claims.Register(t.Context(), pool, dedup.Registration{Name: "ledger", Group: "ledger", Forever: true})
	require.NoError(t, err)
	old, older := idAt(noon(4)), idAt(noon(6))
	claimAlone(t, pool, claims, a, old, idAt(noon(2)))
	claimAlone(t, pool, claims, b, older)
	claimAlone(t, pool, claims, ledger, old, older)
	unquiet(t, pool)

	require.Equal(t, []string{dayName(6), dayName(4)}, maintain(t, pool, claims).Truncated)
	require.Equal(t, endOf(4), mark(t, pool, a))
	require.Equal(t, endOf(6), mark(t, pool, b))
	require.Zero(t, mark(t, pool, idle))
	require.Zero(t, mark(t, pool, ledger))
	require.Equal(t, 2, number(t, pool, `SELECT count(*) FROM effectonce.processed_forever`))
	require.Equal(t, 1, number(t, pool, `SELECT count(*) FROM effectonce.processed_messages`), "what the longer window needs")
	require.Empty(t, maintain(t, pool, claims).Truncated)

	// A forgotten claim is fresh again, and the mark after it shows that it may not be the first.
	fresh, at, err := claimMarked(t.Context(), pool, claims, a, old, pgx.ReadCommitted)
	require.NoError(t, err)
	require.True(t, fresh)
	require.Equal(t, endOf(4), at.UTC())
	// A day with late claims is forgotten again; a later mark stays.
	claimAlone(t, pool, claims, idle, older)
	claimAlone(t, pool, claims, a, older)
	require.Equal(t, []string{dayName(6), dayName(4)}, maintain(t, pool, claims).Truncated)
	require.Equal(t, endOf(4), mark(t, pool, a))
	require.Equal(t, endOf(6), mark(t, pool, idle))
	require.Zero(t, mark(t, pool, register(t, pool, claims, "new", time.Hour)))
}

// Property: if a window shrinks for a moment and grows again, the mark covers everything that was
// forgotten. A2.
func TestWindowThatShrinksAndGrowsLeavesItsMark(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	consumer := register(t, pool, claims, "c", 7*24*time.Hour)
	require.Zero(t, consumer.Replaced())
	id := idAt(noon(2))
	claimAlone(t, pool, claims, consumer, id)
	require.Empty(t, maintain(t, pool, claims).Truncated)
	require.Equal(t, 7*24*time.Hour, register(t, pool, claims, "c", time.Hour).Replaced())
	require.Equal(t, []string{dayName(2)}, maintain(t, pool, claims).Truncated)
	again := register(t, pool, claims, "c", 7*24*time.Hour)
	require.Equal(t, time.Hour, again.Replaced())
	require.Equal(t, consumer.ID(), again.ID())
	require.Equal(t, consumer, register(t, pool, claims, "c", 7*24*time.Hour), "the same window: there is nothing to report")

	fresh, at, err := claimMarked(t.Context(), pool, claims, again, id, pgx.ReadCommitted)
	require.NoError(t, err)
	require.True(t, fresh, "its claim is gone")
	require.Equal(t, endOf(2), at.UTC(), "and the mark says so")
}

// Property: a consumer whose first claim in a day came after the day was read, and before it was
// locked, has its mark moved. A2.
func TestLateHolderOfADayIsMarked(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	a, b, idle := register(t, pool, claims, "a", time.Hour), register(t, pool, claims, "b", time.Hour), register(t, pool, claims, "idle", time.Hour)
	for {
		claimAlone(t, pool, claims, a, idAt(noon(4)))
		late, pid := begin(t, pool, pgx.TxOptions{})
		_, err := claims.Claim(t.Context(), late, b, idAt(noon(4)), 0)
		require.NoError(t, err)
		done := make(chan dedup.Report, 1)
		go func() {
			report, _ := claims.Maintain(t.Context(), pool, dedup.MaintainOptions{Owner: "test"})
			done <- report
		}()
		blocked := false
		for !blocked && len(done) == 0 {
			require.NoError(t, pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks l WHERE NOT granted AND $1 = ANY (pg_blocking_pids(l.pid))
				AND relation = ('effectonce.' || $2)::regclass)`, int32(pid), dayName(4)).Scan(&blocked))
		}
		require.NoError(t, late.Commit(t.Context()))
		if len((<-done).Truncated) == 1 {
			break
		} // otherwise the lock timed out, before or after it was seen, which may happen on a busy machine
	}
	require.Equal(t, endOf(4), mark(t, pool, a))
	require.Equal(t, endOf(4), mark(t, pool, b))
	require.Zero(t, mark(t, pool, idle))
}

// Property: if reading the consumers with claims in a day takes too long under its lock, the marks
// of all consumers that forget are moved. A2.
func TestEveryConsumerIsMarkedWhereTheLookTakesTooLong(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	a, b := register(t, pool, claims, "a", time.Hour), register(t, pool, claims, "b", time.Hour)
	ledger, err := claims.Register(t.Context(), pool, dedup.Registration{Name: "ledger", Group: "ledger", Forever: true})
	require.NoError(t, err)
	fill := func(daysAgo int) {
		exec(t, pool, `INSERT INTO effectonce.processed_messages
			SELECT overlay(effectonce.uuid_v7()::text PLACING left(effectonce.uuid_floor($1)::text, 13) FROM 1)::uuid, $2, 0 FROM generate_series(1, 200000)`,
			noon(daysAgo), a.ID())
	}
	unquiet(t, pool)
	fill(6)
	claims.SetLookMax(waitMax) // on any machine
	maintain(t, pool, claims)
	require.Equal(t, endOf(6), mark(t, pool, a))
	require.Zero(t, mark(t, pool, b), "there is time enough")

	fill(4)
	claims.SetLookMax(time.Millisecond)
	require.Equal(t, []string{dayName(4)}, maintain(t, pool, claims).Truncated)
	require.Equal(t, endOf(4), mark(t, pool, a))
	require.Equal(t, endOf(4), mark(t, pool, b))
	require.Zero(t, mark(t, pool, ledger))
}

// Property: sweeping moves the mark of each consumer past every claim that it deleted, with a
// margin, in the same transaction, and never past the slowest position of its group. A2.
func TestSweepMovesMarksButNotPastPositions(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	a, b, idle := register(t, pool, claims, "a", time.Hour), register(t, pool, claims, "b", time.Hour), register(t, pool, claims, "idle", time.Hour)
	exec(t, pool, `INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, caught_up_at) VALUES
		('a', 't', 0, clock_timestamp()), ('a', 't', 1, clock_timestamp() - interval '90 minutes'), ('b', 't', 0, clock_timestamp())`)
	times := map[string]time.Time{}
	for _, age := range []string{"100 hours", "3 hours", "135 minutes", "1 minute"} {
		var at time.Time
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT clock_timestamp() - $1::text::interval`, age).Scan(&at))
		times[age] = at.UTC()
		for _, consumer := range []dedup.Consumer{a, b} {
			for _, id := range []uuid.UUID{dedup.MessageID("s", []byte(age)), idAt(at.AddDate(-1, 0, 0)), idAt(at.AddDate(1, 0, 0))} {
				exec(t, pool, `INSERT INTO effectonce.processed_messages VALUES ($1, $2, 0, $3)`, id, consumer.ID(), at)
			}
		}
	}
	require.EqualValues(t, 3*(2+3), maintain(t, pool, claims).Swept)
	require.Equal(t, times["3 hours"].Add(time.Hour), mark(t, pool, a), "135 minutes and an hour would be past its slower position")
	require.Equal(t, times["135 minutes"].Add(time.Hour), mark(t, pool, b))
	require.Zero(t, mark(t, pool, idle))

	exec(t, pool, `UPDATE effectonce.consumer_positions SET caught_up_at = clock_timestamp()`)
	exec(t, pool, `UPDATE effectonce.consumers SET forgotten_to = clock_timestamp() - interval '5 minutes' WHERE name = 'a'`)
	before := mark(t, pool, a)
	require.EqualValues(t, 3, maintain(t, pool, claims).Swept)
	require.Equal(t, before, mark(t, pool, a), "a mark does not move back")
}

// Property: a transaction with one snapshot for all statements, which began before claims were
// forgotten, does not take the claim for the first one. A claim that looks fresh is a serialization
// failure, and the next transaction sees the mark. That holds for days and for sweeps. A2.
func TestOldSnapshotDoesNotHideWhatWasForgotten(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		for _, kind := range []string{"day", "sweep"} {
			t.Run(string(level)+", "+kind, func(t *testing.T) {
				t.Parallel()
				pool, claims := pgtest.Pool(t), newClaims(t)
				consumer, id := register(t, pool, claims, "c", time.Hour), idAt(noon(3))
				if kind == "sweep" {
					id = dedup.MessageID("s", []byte("order-4711"))
				}
				exec(t, pool, `INSERT INTO effectonce.processed_messages VALUES ($1, $2, 0, $3)`, id, consumer.ID(), noon(3))
				tx, _ := begin(t, pool, pgx.TxOptions{IsoLevel: level})
				_, err := tx.Exec(t.Context(), `SELECT FROM effectonce.consumers`) // takes the snapshot
				require.NoError(t, err)
				report := maintain(t, pool, claims)
				require.Equal(t, 1, len(report.Truncated)+int(report.Swept))

				fresh, at, err := claimMarkedIn(t.Context(), tx, claims, consumer, id, level != pgx.ReadCommitted)
				if level != pgx.ReadCommitted {
					require.ErrorIs(t, err, dedup.ErrRetry)
					require.NoError(t, tx.Rollback(t.Context()))
					fresh, at, err = claimMarked(t.Context(), pool, claims, consumer, id, level)
				}
				require.NoError(t, err)
				assert.True(t, fresh)
				assert.True(t, at.After(noon(3)), at)
			})
		}
	}
}

// Property: reading the mark keeps no lock. Otherwise maintenance would wait for a moment without
// any transaction.
func TestReadingTheMarkKeepsNoLock(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	consumer := register(t, pool, claims, "c", time.Hour)
	claimAlone(t, pool, claims, consumer, idAt(noon(3)))
	tx, _ := begin(t, pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	fresh, at, err := claimMarkedIn(t.Context(), tx, claims, consumer, idAt(time.Now()), true)
	require.NoError(t, err)
	require.True(t, fresh)
	require.Zero(t, at)
	require.Equal(t, []string{dayName(3)}, maintain(t, pool, claims).Truncated)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, endOf(3), mark(t, pool, consumer))
}
