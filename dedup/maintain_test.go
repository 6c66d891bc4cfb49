package dedup_test

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
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

func exec(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	_, err := pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

func number(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) int {
	t.Helper()
	return pgtest.Count(t, pool, sql, args...)
}

// away makes the database look as if it was not maintained for the given days: everything younger
// is in the partition for later times.
func away(t *testing.T, pool *pgxpool.Pool, days int) {
	t.Helper()
	exec(t, pool, `DO $$
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
			consumer, err := claims.Register(t.Context(), pool, dedup.Registration{Name: "c", Group: "g"})
			require.NoError(t, err)
			today, tomorrow, far := idAt(time.Now()), idAt(time.Now().Add(24*time.Hour)), idAt(time.Now().AddDate(1, 0, 0))
			require.Equal(t, []bool{true, true, true}, claimAlone(t, pool, claims, consumer, today, tomorrow, far))
			require.Equal(t, 1, number(t, pool, partitionOfSQL, today, "ahead"))

			report := maintain(t, pool, claims)
			require.Len(t, report.Made, 32+days)
			require.Equal(t, 1, number(t, pool, partitionOfSQL, today, time.Now().UTC().Format("20060102")))
			require.Equal(t, 1, number(t, pool, partitionOfSQL, tomorrow, time.Now().UTC().AddDate(0, 0, 1).Format("20060102")))
			require.Equal(t, 1, number(t, pool, partitionOfSQL, far, "ahead"))
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
	first := number(t, pool, `SELECT count(*) FROM pg_class WHERE relname ~ '^processed_messages_[0-9]{8}$' AND relkind = 'r'`)
	require.Empty(t, maintain(t, pool, claims).Dropped, "no consumer is registered")

	register := func(name string, window time.Duration) {
		_, err := claims.Register(t.Context(), pool, dedup.Registration{Name: name, Group: name, Window: window})
		require.NoError(t, err)
	}
	_, err := claims.Register(t.Context(), pool, dedup.Registration{Name: "ledger", Group: "ledger", Forever: true})
	require.NoError(t, err)
	register("short", time.Minute)
	register("long", 5*24*time.Hour)
	exec(t, pool, `INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, record_time) VALUES
		('ledger', 'a', 0, NULL), ('short', 'a', 0, clock_timestamp() - interval '6 days 12 hours'), ('somebody', 'a', 0, NULL)`)
	report, err := claims.Maintain(t.Context(), pool, dedup.MaintainOptions{Owner: "test", DryRun: true})
	require.NoError(t, err)
	require.NotEmpty(t, report.Dropped)
	require.Equal(t, first, number(t, pool, `SELECT count(*) FROM pg_class WHERE relname ~ '^processed_messages_[0-9]{8}$' AND relkind = 'r'`), "a dry run")
	dropped := maintain(t, pool, claims)
	require.Equal(t, report.Dropped, dropped.Dropped)
	require.Contains(t, dropped.HeldBack, "group short, topic a, partition 0")
	oldest := func() string {
		var name string
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT min(relname) FROM pg_class WHERE relname ~ '^processed_messages_[0-9]{8}$' AND relkind = 'r'`).Scan(&name))
		return name
	}
	day := func(ago time.Duration) string {
		return "processed_messages_" + time.Now().UTC().Add(-ago).Format("20060102")
	}
	require.Equal(t, day(157*time.Hour), oldest(), "the position of group short")

	// The partition is at its end: the window of the other consumer counts now.
	exec(t, pool, `UPDATE effectonce.consumer_positions SET caught_up_at = clock_timestamp() WHERE consumer_group = 'short'`)
	maintain(t, pool, claims)
	require.Equal(t, day(5*24*time.Hour+time.Hour), oldest())
	consumer, err := claims.Register(t.Context(), pool, dedup.Registration{Name: "long", Group: "long", Window: 2 * 24 * time.Hour})
	require.NoError(t, err)
	maintain(t, pool, claims)
	require.Equal(t, day(2*24*time.Hour+time.Hour), oldest())
	old := idAt(time.Now().AddDate(0, 0, -6))
	require.Equal(t, []bool{true}, claimAlone(t, pool, claims, consumer, old))
	require.Equal(t, 1, number(t, pool, partitionOfSQL, old, "past"))
	// A position without a record keeps everything.
	exec(t, pool, `INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition) VALUES ('long', 'new', 7)`)
	report = maintain(t, pool, claims)
	require.Empty(t, report.Dropped)
	require.Contains(t, report.HeldBack, "partition 7")
}

// Property: claims of IDs without time are deleted when their own consumer's window is over and its
// positions have passed, in small steps over several runs.
func TestUntimedClaimsAreSwept(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	ids := map[string]int32{}
	for name, window := range map[string]time.Duration{"short": time.Hour, "long": 48 * time.Hour, "held": time.Hour} {
		consumer, err := claims.Register(t.Context(), pool, dedup.Registration{Name: name, Group: name, Window: window})
		require.NoError(t, err)
		ids[name] = consumer.ID()
	}
	exec(t, pool, `INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, caught_up_at) VALUES ('short', 'a', 0, clock_timestamp()), ('held', 'a', 0, clock_timestamp() - interval '2 days')`)
	for _, id := range []int32{ids["short"], ids["long"], ids["held"], 999} {
		for _, age := range []string{"1 minute", "3 hours", "100 hours"} {
			exec(t, pool, `INSERT INTO effectonce.processed_messages SELECT effectonce.message_id('s', $1 || $2 || n), $3, 0, clock_timestamp() - $2::text::interval FROM generate_series(1, 1000) n`, fmt.Sprint(id), age, id)
		}
	}
	report := maintain(t, pool, claims)
	left := func(id int32) int {
		return number(t, pool, `SELECT count(*) FROM effectonce.processed_messages_untimed WHERE consumer = $1`, id)
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
	_, err := claims.Register(t.Context(), pool, dedup.Registration{Name: "c", Group: "g"})
	require.NoError(t, err)
	exec(t, pool, `INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition) VALUES ('g', 'a', 3)`)
	exec(t, pool, `INSERT INTO effectonce.processed_messages SELECT effectonce.uuid_v7(), 1, 0 FROM generate_series(1, 20000)`)
	exec(t, pool, `INSERT INTO effectonce.processed_messages SELECT effectonce.message_id('s', n::text), 1, 0 FROM generate_series(1, 30) n`)
	exec(t, pool, `INSERT INTO effectonce.processed_forever SELECT effectonce.uuid_v7(), 2, 0 FROM generate_series(1, 40)`)
	testwait.True(t, "the statistics are complete", func() bool {
		s, err := claims.ReadStats(t.Context(), pool)
		require.NoError(t, err)
		return s.Claims == 20030 && s.Untimed == 30 && s.Forever == 40 && s.BytesPerClaim > 80 && s.BytesPerClaim < 200 &&
			s.HeldBack == "group g, topic a, partition 3" && s.MaintainedSeconds == nil && s.LastDay.Sub(s.OldestDay) > 30*24*time.Hour
	})
	maintain(t, pool, claims)
	s, err := claims.ReadStats(t.Context(), pool)
	require.NoError(t, err)
	require.NotNil(t, s.MaintainedSeconds)
}

// Property: one process at a time maintains; a holder that died is replaced when its lease is over.
func TestOneMaintainerAtATime(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	exec(t, pool, `INSERT INTO effectonce.maintenance (job, owner, lease_until) VALUES ('claims', 'somebody', clock_timestamp() + interval '1 minute')`)
	report, err := claims.Maintain(t.Context(), pool, dedup.MaintainOptions{Owner: "test"})
	require.NoError(t, err)
	require.True(t, report.Elsewhere)
	exec(t, pool, `UPDATE effectonce.maintenance SET lease_until = clock_timestamp() - interval '1 ms' WHERE job = 'claims'`)
	maintain(t, pool, claims)
}
