package dedup_test

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// idAt makes a UUIDv7 of a time.
func idAt(at time.Time) uuid.UUID {
	var id uuid.UUID
	_, _ = rand.Read(id[6:])
	var milli [8]byte
	binary.BigEndian.PutUint64(milli[:], uint64(at.UnixMilli()))
	copy(id[:6], milli[2:])
	id[6], id[8] = id[6]&0x0f|0x70, id[8]&0x3f|0x80
	return id
}

func maintain(t *testing.T, pool *pgxpool.Pool, claims *dedup.Claims) dedup.Report {
	t.Helper()
	report, err := claims.Maintain(t.Context(), pool, dedup.MaintainOptions{Owner: "test"})
	require.NoError(t, err)
	require.False(t, report.Elsewhere)
	return report
}

// away makes the database look as if it was not maintained for the given days: everything younger
// is in the partition for later times.
func away(t *testing.T, pool *pgxpool.Pool, days int) {
	t.Helper()
	pgtest.Exec(t, pool, `DO $$
DECLARE
  cut uuid := effectonce.uuid_floor(date_trunc('day', clock_timestamp() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' - interval '`+fmt.Sprint(days)+` days');
  part record;
BEGIN
  EXECUTE 'ALTER TABLE effectonce.processed_messages DETACH PARTITION effectonce.processed_messages_ahead';
  FOR part IN SELECT relname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = 'effectonce' AND relkind = 'r'
    AND relname ~ '^processed_messages_[0-9]{8}$' AND relname >= 'processed_messages_' || to_char(clock_timestamp() AT TIME ZONE 'UTC' - interval '`+fmt.Sprint(days)+` days', 'YYYYMMDD') LOOP
    EXECUTE format('DROP TABLE effectonce.%I', part.relname);
  END LOOP;
  EXECUTE format('ALTER TABLE effectonce.processed_messages ATTACH PARTITION effectonce.processed_messages_ahead FOR VALUES FROM (%L) TO (''80000000-0000-0000-0000-000000000000'')', cut);
END $$`)
}

const partitionOfSQL = `SELECT count(*) FROM effectonce.processed_messages WHERE message_id = $1 AND tableoid::regclass::text = 'effectonce.processed_messages_' || $2`

// Property: after any absence a run creates the missing days and moves the claims that were made
// during it into their days; a second run has nothing to do. C30.
func TestDaysAreMadeAheadAfterAnyAbsence(t *testing.T) {
	t.Parallel()
	for _, days := range []int{0, 6} {
		t.Run(fmt.Sprint(days), func(t *testing.T) {
			t.Parallel()
			pool, claims := pgtest.Pool(t), newClaims(t)
			away(t, pool, days)
			consumer := registered(t, pool, claims, dedup.Registration{Name: "c", Group: "g"})
			now := pgtest.Value[time.Time](t, pool, `SELECT clock_timestamp()`)
			today, tomorrow, far := idAt(now), idAt(now.Add(24*time.Hour)), idAt(now.AddDate(1, 0, 0))
			require.Equal(t, []bool{true, true, true}, claimAlone(t, pool, claims, consumer, today, tomorrow, far))
			require.Equal(t, 1, pgtest.Count(t, pool, partitionOfSQL, today, "ahead"))

			report := maintain(t, pool, claims)
			require.Len(t, report.Made, 32+days)
			require.Equal(t, 1, pgtest.Count(t, pool, partitionOfSQL, today, now.UTC().Format("20060102")))
			require.Equal(t, 1, pgtest.Count(t, pool, partitionOfSQL, tomorrow, now.UTC().AddDate(0, 0, 1).Format("20060102")))
			require.Equal(t, 1, pgtest.Count(t, pool, partitionOfSQL, far, "ahead"))
			require.Equal(t, []bool{false, false, false}, claimAlone(t, pool, claims, consumer, today, tomorrow, far))
			require.Empty(t, maintain(t, pool, claims).Made)
		})
	}
}

// Property: a day is forgotten when the longest window is over and every stored position has passed
// it, not before. An ID of a dropped day still finds a partition. Only positions of consumers that
// forget count. C29.
func TestDaysAreDroppedBehindWindowAndPositions(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	first := pgtest.Count(t, pool, `SELECT count(*) FROM pg_class WHERE relname ~ '^processed_messages_[0-9]{8}$' AND relkind = 'r'`)
	require.Empty(t, maintain(t, pool, claims).Dropped, "no consumer is registered")

	registered(t, pool, claims, dedup.Registration{Name: "ledger", Group: "ledger", Forever: true})
	register(t, pool, claims, "short", time.Minute)
	register(t, pool, claims, "long", 5*24*time.Hour)
	pgtest.Exec(t, pool, `INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, record_time) VALUES
		('ledger', 'a', 0, NULL), ('short', 'a', 0, clock_timestamp() - interval '6 days 12 hours'), ('somebody', 'a', 0, NULL)`)
	report, err := claims.Maintain(t.Context(), pool, dedup.MaintainOptions{Owner: "test", DryRun: true})
	require.NoError(t, err)
	require.NotEmpty(t, report.Dropped)
	pgtest.Exec(t, pool, `INSERT INTO effectonce.processed_messages SELECT $1, id, 0 FROM effectonce.consumers WHERE name = 'short'`, [16]byte(idAt(time.Now().Add(-150*time.Hour))))
	require.Equal(t, first, pgtest.Count(t, pool, `SELECT count(*) FROM pg_class WHERE relname ~ '^processed_messages_[0-9]{8}$' AND relkind = 'r'`), "a dry run")
	dropped := maintain(t, pool, claims)
	require.Equal(t, report.Dropped, dropped.Dropped)
	require.Contains(t, dropped.HeldBack, "group short, topic a, partition 0")
	oldest := func() string {
		return pgtest.Value[string](t, pool, `SELECT min(relname) FROM pg_class WHERE relname ~ '^processed_messages_[0-9]{8}$' AND relkind = 'r'`)
	}
	day := func(ago time.Duration) string {
		now := pgtest.Value[time.Time](t, pool, `SELECT clock_timestamp()`)
		return "processed_messages_" + now.UTC().Add(-ago).Format("20060102")
	}
	require.Equal(t, day(157*time.Hour), oldest(), "the position of group short")

	// The partition is at its end: the window of the other consumer counts now.
	pgtest.Exec(t, pool, `UPDATE effectonce.consumer_positions SET caught_up_at = clock_timestamp() WHERE consumer_group = 'short'`)
	maintain(t, pool, claims)
	require.Equal(t, day(5*24*time.Hour+time.Hour), oldest())
	consumer := register(t, pool, claims, "long", 2*24*time.Hour)
	maintain(t, pool, claims)
	require.Equal(t, day(2*24*time.Hour+time.Hour), oldest())
	old := idAt(time.Now().AddDate(0, 0, -6))
	require.Equal(t, []bool{true}, claimAlone(t, pool, claims, consumer, old))
	require.Equal(t, 1, pgtest.Count(t, pool, partitionOfSQL, old, "past"))
	// A position without a record keeps everything.
	pgtest.Exec(t, pool, `INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition) VALUES ('long', 'new', 7)`)
	report = maintain(t, pool, claims)
	require.Empty(t, report.Dropped)
	require.Empty(t, report.HeldBack, "but nothing is that old")
}

// Property: claims of IDs without time are deleted when their own consumer's window is over and its
// positions have passed, in small steps over several runs.
func TestUntimedClaimsAreSwept(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	ids := map[string]int32{}
	for name, window := range map[string]time.Duration{"short": time.Hour, "long": 48 * time.Hour, "held": time.Hour} {
		ids[name] = register(t, pool, claims, name, window).ID()
	}
	pgtest.Exec(t, pool, `INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, caught_up_at) VALUES ('short', 'a', 0, clock_timestamp()), ('held', 'a', 0, clock_timestamp() - interval '2 days')`)
	for _, id := range []int32{ids["short"], ids["long"], ids["held"], 999} {
		for _, age := range []string{"1 minute", "3 hours", "100 hours"} {
			pgtest.Exec(t, pool, `INSERT INTO effectonce.processed_messages SELECT effectonce.message_id('s', $1 || $2 || n), $3, 0, clock_timestamp() - $2::text::interval FROM generate_series(1, 1000) n`, fmt.Sprint(id), age, id)
		}
	}
	report := maintain(t, pool, claims)
	left := func(id int32) int {
		return pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.processed_messages_untimed WHERE consumer = $1`, id)
	}
	require.Equal(t, 1000, left(ids["short"]))
	require.Equal(t, 2000, left(ids["long"]))
	require.Equal(t, 2000, left(ids["held"]))
	require.Equal(t, 2000, left(999), "of no consumer: the longest window")
	require.EqualValues(t, 5000, report.Swept)
	require.EqualValues(t, 0, maintain(t, pool, claims).Swept)
}

// Property: the statistics show the space that claims take, and the position that keeps them.
func TestStatsSayWhatClaimsTake(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	registered(t, pool, claims, dedup.Registration{Name: "c", Group: "g", Window: 24 * time.Hour})
	pgtest.Exec(t, pool, `INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition) VALUES ('g', 'a', 3)`)
	fresh, err := claims.ReadStats(t.Context(), pool)
	require.NoError(t, err)
	require.Empty(t, fresh.HeldBack, "a new consumer keeps nothing")
	pgtest.Exec(t, pool, `INSERT INTO effectonce.processed_messages VALUES ($1, 1, 0)`, [16]byte(idAt(time.Now().Add(-50*time.Hour))))
	pgtest.Exec(t, pool, `INSERT INTO effectonce.processed_messages SELECT effectonce.uuid_v7(), 1, 0 FROM generate_series(1, 20000)`)
	pgtest.Exec(t, pool, `INSERT INTO effectonce.processed_messages SELECT effectonce.message_id('s', n::text), 1, 0 FROM generate_series(1, 30) n`)
	pgtest.Exec(t, pool, `INSERT INTO effectonce.processed_forever SELECT effectonce.uuid_v7(), 2, 0 FROM generate_series(1, 40)`)
	testwait.True(t, "the statistics are complete", func() bool {
		s, err := claims.ReadStats(t.Context(), pool)
		require.NoError(t, err)
		return s.Claims == 20031 && s.Untimed == 30 && s.Forever == 40 && s.BytesPerClaim > 80 && s.BytesPerClaim < 200 &&
			s.HeldBack == "group g, topic a, partition 3" && s.MaintainedSeconds == nil && s.LastDay.Sub(s.OldestDay) > 30*24*time.Hour
	})
	maintain(t, pool, claims)
	s, err := claims.ReadStats(t.Context(), pool)
	require.NoError(t, err)
	require.NotNil(t, s.MaintainedSeconds)
}

func register(t *testing.T, pool *pgxpool.Pool, claims *dedup.Claims, name string, window time.Duration) dedup.Consumer {
	t.Helper()
	return registered(t, pool, claims, dedup.Registration{Name: name, Group: name, Window: window})
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

func requireMarks(t *testing.T, pool *pgxpool.Pool, want map[dedup.Consumer]time.Time) {
	t.Helper()
	for consumer, at := range want {
		require.Equal(t, at, mark(t, pool, consumer), consumer.ID())
	}
}

// unquiet prevents a lock on the whole table, as any open transaction that claims does, until the
// test or the transaction ends.
func unquiet(t *testing.T, pool *pgxpool.Pool) pgx.Tx {
	t.Helper()
	tx, _ := begin(t, pool, pgx.TxOptions{})
	pgtest.Exec(t, tx, "LOCK TABLE ONLY effectonce.processed_messages IN ACCESS SHARE MODE")
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
	ledger := registered(t, pool, claims, dedup.Registration{Name: "ledger", Group: "ledger", Forever: true})
	old, older := idAt(noon(4)), idAt(noon(6))
	claimAlone(t, pool, claims, a, old, idAt(noon(2)))
	claimAlone(t, pool, claims, b, older)
	claimAlone(t, pool, claims, ledger, old, older)
	unquiet(t, pool)

	require.Equal(t, []string{dayName(6), dayName(4)}, maintain(t, pool, claims).Truncated)
	requireMarks(t, pool, map[dedup.Consumer]time.Time{a: endOf(4), b: endOf(6), idle: {}, ledger: {}})
	require.Equal(t, 2, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.processed_forever`))
	require.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.processed_messages`), "what the longer window needs")
	require.Empty(t, maintain(t, pool, claims).Truncated)

	// A forgotten claim is fresh again, and the mark after it shows that it may not be the first.
	fresh, at, err := claimMarked(t.Context(), pool, claims, a, old, pgx.ReadCommitted)
	require.NoError(t, err)
	require.True(t, fresh)
	require.Equal(t, endOf(4), at.UTC())
	// A day with late claims is forgotten again; a later mark stays.
	claimAlone(t, pool, claims, idle, older)
	forgotten, _ := begin(t, pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	_, err = claims.Claim(t.Context(), forgotten, a, older, 0)
	require.ErrorIs(t, err, dedup.ErrForgotten, "it may have been claimed before")
	require.NoError(t, forgotten.Rollback(t.Context()))
	require.Equal(t, []string{dayName(6), dayName(4)}, maintain(t, pool, claims).Truncated)
	requireMarks(t, pool, map[dedup.Consumer]time.Time{a: endOf(4), idle: endOf(6), register(t, pool, claims, "new", time.Hour): {}})
}

// Property: no claim comes between the end of a day's claims and the mark: one of a forgotten message
// that is made just before the mark moves waits, and sees the mark. A2.
func TestClaimOfAForgottenMessageSeesTheMark(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	consumer, old := register(t, pool, claims, "c", time.Hour), idAt(noon(3))
	claimAlone(t, pool, claims, consumer, old)
	unquiet(t, pool) // otherwise the day is dropped, and its claims are swept one by one
	for {
		tx, pid := begin(t, pool, pgx.TxOptions{})
		done, called, fresh, at := make(chan error, 1), false, false, time.Time{}
		config := pool.Config()
		config.ConnConfig.Tracer = beforeSQL("-- dedup.mark", func() {
			called = true
			go func() {
				var err error
				fresh, at, err = claimMarkedIn(t.Context(), tx, claims, consumer, old, false)
				done <- errors.Join(err, tx.Commit(t.Context()))
			}()
			testwait.True(t, "the claim waits, or is made", func() bool {
				return len(done) > 0 || pgtest.Count(t, pool, `SELECT cardinality(pg_blocking_pids($1))`, int32(pid)) > 0
			})
		})
		report, err := claims.Maintain(t.Context(), pgtest.PoolOf(t, config), dedup.MaintainOptions{Owner: "test"})
		if called {
			require.NoError(t, testwait.Chan(t, "the claim", done))
		}
		if err != nil { // on a busy machine the run gets no lock in time, or is ended while it waits here
			continue
		}
		require.Equal(t, []string{dayName(3)}, report.Truncated)
		require.True(t, fresh)
		require.Equal(t, endOf(3), at.UTC())
		return
	}
}

// Property: a consumer whose first claim in a day was committed while the run waited for the day's lock
// has its mark moved. A2.
func TestLateHolderOfADayIsMarked(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	a, b, idle := register(t, pool, claims, "a", time.Hour), register(t, pool, claims, "b", time.Hour), register(t, pool, claims, "idle", time.Hour)
	for {
		claimAlone(t, pool, claims, a, idAt(noon(4)))
		late, pid := begin(t, pool, pgx.TxOptions{})
		claim(t, claims, late, b, idAt(noon(4)))
		done := make(chan dedup.Report, 1)
		go func() {
			report, _ := claims.Maintain(t.Context(), pool, dedup.MaintainOptions{Owner: "test"})
			done <- report
		}()
		blocked := false
		for !blocked && len(done) == 0 {
			blocked = pgtest.Value[bool](t, pool, `SELECT EXISTS (SELECT FROM pg_locks l WHERE NOT granted AND $1 = ANY (pg_blocking_pids(l.pid))
				AND relation = ('effectonce.' || $2)::regclass)`, int32(pid), dayName(4))
		}
		require.NoError(t, late.Commit(t.Context()))
		if len((<-done).Truncated) == 1 {
			break
		} // otherwise the lock timed out, before or after it was seen, which may happen on a busy machine
	}
	requireMarks(t, pool, map[dedup.Consumer]time.Time{a: endOf(4), b: endOf(4), idle: {}})
}

// Property: if reading the consumers with claims in a day takes too long under its lock, the marks
// of all consumers that forget are moved. A2.
func TestEveryConsumerIsMarkedWhereTheLookTakesTooLong(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	a, b := register(t, pool, claims, "a", time.Hour), register(t, pool, claims, "b", time.Hour)
	ledger := registered(t, pool, claims, dedup.Registration{Name: "ledger", Group: "ledger", Forever: true})
	fill := func(daysAgo int) {
		pgtest.Exec(t, pool, `INSERT INTO effectonce.processed_messages
			SELECT overlay(effectonce.uuid_v7()::text PLACING left(effectonce.uuid_floor($1)::text, 13) FROM 1)::uuid, $2, 0 FROM generate_series(1, 200000)`,
			noon(daysAgo), a.ID())
	}
	unquiet(t, pool)
	fill(6)
	claims.SetLookMax(testwait.Bound) // on any machine
	maintain(t, pool, claims)
	requireMarks(t, pool, map[dedup.Consumer]time.Time{a: endOf(6), b: {}}) // there is time enough

	fill(4)
	claims.SetLookMax(time.Millisecond)
	require.Equal(t, []string{dayName(4)}, maintain(t, pool, claims).Truncated)
	requireMarks(t, pool, map[dedup.Consumer]time.Time{a: endOf(4), b: endOf(4), ledger: {}})
}

// Property: sweeping moves the mark of each consumer past every claim that it deleted, with a
// margin, in the same transaction, and never past the slowest position of its group. A2.
func TestSweepMovesMarksButNotPastPositions(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	a, b, idle := register(t, pool, claims, "a", time.Hour), register(t, pool, claims, "b", time.Hour), register(t, pool, claims, "idle", time.Hour)
	pgtest.Exec(t, pool, `INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, caught_up_at) VALUES
		('a', 't', 0, clock_timestamp()), ('a', 't', 1, clock_timestamp() - interval '90 minutes'), ('b', 't', 0, clock_timestamp())`)
	times := map[string]time.Time{}
	for _, age := range []string{"100 hours", "3 hours", "135 minutes", "1 minute"} {
		at := pgtest.Value[time.Time](t, pool, `SELECT clock_timestamp() - $1::text::interval`, age)
		times[age] = at.UTC()
		for _, consumer := range []dedup.Consumer{a, b} {
			for _, id := range []uuid.UUID{dedup.MessageID("s", []byte(age)), idAt(at.AddDate(-1, 0, 0)), idAt(at.AddDate(1, 0, 0))} {
				pgtest.Exec(t, pool, `INSERT INTO effectonce.processed_messages VALUES ($1, $2, 0, $3)`, id, consumer.ID(), at)
			}
		}
	}
	require.EqualValues(t, 3*(2+3), maintain(t, pool, claims).Swept)
	require.Equal(t, times["3 hours"].Add(time.Hour), mark(t, pool, a), "135 minutes and an hour would be past its slower position")
	require.Equal(t, times["135 minutes"].Add(time.Hour), mark(t, pool, b))
	require.Zero(t, mark(t, pool, idle))

	pgtest.Exec(t, pool, `UPDATE effectonce.consumer_positions SET caught_up_at = clock_timestamp()`)
	pgtest.Exec(t, pool, `UPDATE effectonce.consumers SET forgotten_to = clock_timestamp() - interval '5 minutes' WHERE name = 'a'`)
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
				pgtest.Exec(t, pool, `INSERT INTO effectonce.processed_messages VALUES ($1, $2, 0, $3)`, id, consumer.ID(), noon(3))
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
