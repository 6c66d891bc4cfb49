package integration_test

import (
	"bufio"
	"context"
	"fmt"
	"maps"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/relay"
)

// Property: whatever the order of transaction ids, row numbers and commits, and while a transaction
// somewhere in the cluster stays open for the whole run, every committed row is published once, no
// rolled-back row is, versions of a key arrive in commit order, and rows keep flowing. Rows O1, O2,
// O3 of guarantees.md, O4, O6, O7.
func TestRelayKeepsCommitOrderBehindABystander(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	url := pgtest.Cluster(t, nil).URL
	pgtest.Migrate(t, url)
	pool := openWorkload(t, url)
	topic := kafkatest.Topic(t, 4)

	// The bystander has a transaction id and a snapshot, and does nothing.
	bystander, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer bystander.Rollback(context.WithoutCancel(ctx))
	_, err = bystander.Exec(ctx, `SELECT pg_current_xact_id()`)
	require.NoError(t, err)

	stop := running(t, pool, kafkatest.Brokers(t), relay.Config{Lease: time.Minute})

	writers{goroutines: 24, transactions: 1200, keys: 20, topic: topic, seed: 1, pauses: true}.run(ctx, t, pool)

	// Everything flows while the bystander is still open.
	want := written(ctx, t, pool)
	total := 0
	for _, version := range want {
		total += version
	}
	eventually(t, "rows published while the bystander is open", func() (bool, any) {
		n := count(ctx, t, pool, `SELECT coalesce(sum(published), 0) FROM effectonce.outbox_progress_now`)
		return n >= total, fmt.Sprintf("%d of %d", n, total)
	})
	require.NoError(t, bystander.Rollback(ctx))
	stop()

	s := judge(t, kafkatest.ReadAll(t, topic))
	require.Equal(t, want, s.last)
	require.Empty(t, s.missing)
	require.Zero(t, s.inversions)
	require.Zero(t, s.duplicates, "without a crash nothing is published twice")
}

// Property: a relay that is killed at any point between two durable steps, and started again, loses
// no row and changes no order among first occurrences; it publishes again at most what was in
// flight, and with exactly-once nothing that a reader of committed records sees. Row O8, and O9 of
// guarantees.md: progress never gets ahead of the acknowledgement.
func TestRelayKilledAtEachPointLosesNothing(t *testing.T) {
	t.Parallel()
	points := map[bool][]string{
		false: {crashpoint.RelayRead, crashpoint.RelayProduced, crashpoint.RelayAcknowledged, crashpoint.RelayProgressed},
		true:  {crashpoint.RelayRead, crashpoint.RelayProduced, crashpoint.RelayAcknowledged, crashpoint.RelayCommitted, crashpoint.RelayProgressed},
	}
	for exactly, points := range points {
		for _, point := range points {
			for _, after := range []int{0, 2} {
				t.Run(fmt.Sprintf("%s/%s/%d", guarantee(exactly), point, after), func(t *testing.T) {
					t.Parallel()
					if after != 0 || point == crashpoint.RelayRead || point == crashpoint.RelayProgressed || exactly != (point == crashpoint.RelayCommitted) {
						longtest.Only(t, "eighteen pairs of processes; the others are those at which something can be lost")
					}
					killRelay(t, child{ExactlyOnce: exactly, CrashAt: point, CrashAfter: after})
				})
			}
		}
	}
}

func guarantee(exactly bool) string {
	if exactly {
		return "exactly once"
	}
	return "at least once"
}

func killRelay(t *testing.T, c child) {
	t.Helper()
	ctx := t.Context()
	c.URL = pgtest.Database(t)
	pool := openWorkload(t, c.URL)
	topic := kafkatest.Topic(t, 2)
	c.Role, c.Brokers, c.Lease = "relay", kafkatest.Brokers(t), time.Second
	first := start(t, c)
	// Written until it happens: how many pages a few rows make is up to the scheduler.
	eventually(t, "the relay reaches its crash point", func() (bool, any) {
		writers{goroutines: 4, transactions: 80, keys: 5, topic: topic, seed: 2}.run(ctx, t, pool)
		return first.ended(), first.log
	})
	require.ErrorContains(t, first.err, "killed")
	c.CrashAt = ""
	second := start(t, c)
	s := requirePublished(t, pool, topic)
	require.NoError(t, second.terminate())
	if c.ExactlyOnce {
		require.Zero(t, s.duplicates)
	}
}

// Property: the memory of a relay that finds a backlog does not grow with the backlog.
func TestBacklogDrainsInBoundedMemory(t *testing.T) {
	longtest.Only(t, "1,000,000 rows")
	t.Parallel()
	large := 1_000_000
	small := drainBacklog(t, 50_000)
	big := drainBacklog(t, large)
	t.Logf("peak memory: %d MB for 50,000 rows, %d MB for %d rows", small>>20, big>>20, large)
	require.Less(t, big, 2*small+64<<20)
	if !raceDetector { // which has memory of its own
		require.Less(t, big, int64(200<<20))
	}
}

// drainBacklog returns the peak memory of a relay process that publishes rows of 256 bytes.
func drainBacklog(t *testing.T, rows int) int64 {
	t.Helper()
	ctx := t.Context()
	url := pgtest.Database(t)
	pool := open(t, url)
	topic := kafkatest.Topic(t, 2, "retention.ms", "-1")
	_, err := pool.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key, payload)
		SELECT $1, ('k' || n % 1000)::bytea, convert_to(repeat(md5(n::text), 8), 'UTF8') FROM generate_series(1, $2) n`, topic, rows)
	require.NoError(t, err)
	p := start(t, child{Role: "relay", URL: url, Brokers: kafkatest.Brokers(t), Lease: time.Minute})
	eventually(t, "the backlog drains", func() (bool, any) {
		n := count(ctx, t, pool, `SELECT coalesce(sum(published), 0) FROM effectonce.outbox_progress_now`)
		return n >= rows, n
	})
	peak := peakMemory(t, p.cmd.Process.Pid)
	require.NoError(t, p.terminate())
	require.Equal(t, rows, kafkatest.Count(t, topic))
	return peak
}

// peakMemory reads the high-water mark of a process's resident memory, in bytes.
func peakMemory(t *testing.T, pid int) int64 {
	t.Helper()
	file, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	if os.IsNotExist(err) && runtime.GOOS != "linux" {
		t.Skip("LOUD SKIP: no /proc on this system, so the memory of another process cannot be read")
	}
	require.NoError(t, err)
	defer func() { _ = file.Close() }()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		if rest, ok := strings.CutPrefix(lines.Text(), "VmHWM:"); ok {
			var kilobytes int64
			_, err := fmt.Sscan(rest, &kilobytes)
			require.NoError(t, err)
			return kilobytes << 10
		}
	}
	t.Fatal("no VmHWM in /proc/PID/status")
	return 0
}

func open(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	config.MaxConns = 30
	return pgtest.PoolOf(t, config)
}

// requirePublished waits until the topic has every committed version, and judges it.
func requirePublished(t *testing.T, pool *pgxpool.Pool, topic string) stream {
	t.Helper()
	return requirePublishedAt(t, kafkatest.Brokers(t), pool, topic)
}

// requirePublishedAt is requirePublished for another cluster.
func requirePublishedAt(t *testing.T, brokers []string, pool *pgxpool.Pool, topic string) stream {
	t.Helper()
	ctx := t.Context()
	want := written(ctx, t, pool)
	eventually(t, "everything is published", func() (bool, any) {
		var waiting, shards int
		err := pool.QueryRow(ctx, `SELECT (SELECT count(*) FROM effectonce.outbox_progress_now), count(*)
			FROM effectonce.outbox o JOIN effectonce.outbox_progress_now p ON o.shard % p.shards = p.shard JOIN effectonce.outbox_ticks t USING (tick)
			WHERE o.seq > p.floor AND NOT pg_visible_in_snapshot(o.txid, t.snapshot)`).Scan(&shards, &waiting)
		require.NoError(t, err)
		return waiting == 0 && shards > 0 && shards == count(ctx, t, pool, `SELECT min(shards) FROM effectonce.outbox_progress_now`), waiting
	})
	// Brokers answer a commit before they have marked it everywhere: until then readers of
	// committed records see less.
	var s stream
	eventually(t, "everything can be read", func() (bool, any) {
		s = judge(t, kafkatest.ReadAllAt(t, brokers, topic))
		return maps.Equal(want, s.last), s.last
	})
	require.Empty(t, s.missing)
	require.Zero(t, s.inversions)
	return s
}

// expandSQL is what the migration of a next release may do while older programs run: new columns,
// in the middle of what they would read with an asterisk or write without names, and new tables.
const expandSQL = `DO $$
DECLARE
  known regclass;
BEGIN
  FOR known IN SELECT c.oid FROM pg_class c WHERE c.relnamespace = 'effectonce'::regnamespace AND c.relkind IN ('r', 'p')
    AND NOT c.relispartition AND c.relname NOT IN ('schema_version', 'schema_compatibility') LOOP
    EXECUTE format('ALTER TABLE %s ADD COLUMN of_the_next_release text NOT NULL DEFAULT %L, ADD COLUMN unknown bigint', known, 'new');
  END LOOP;
END
$$;
CREATE TABLE effectonce.of_the_next_release (relay text);
UPDATE effectonce.schema_version SET version = version + 1`

// Property: relays that run while the migration of a next release adds columns and tables continue
// in all that they do (publish, bury, release, change shards, recover from failures), lose nothing
// and publish nothing twice. A relay that starts then joins them, unless the schema does not work
// with it. A relay of the next release is refused before the migration. Row S14 of guarantees.md.
func TestRelaysRunOnThroughANextMigration(t *testing.T) {
	longtest.Only(t, "what must not be logged depends on time")
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		ctx, pool := t.Context(), openWorkload(t, pgtest.Database(t))
		topic, missing, brokers := kafkatest.Topic(t, 2), kafkatest.UnusedTopic(t), kafkatest.Brokers(t)
		cfg := relay.Config{ExactlyOnce: exactly, Shards: 2, Lease: time.Second}
		stops := []func(){running(t, pool, brokers, cfg), running(t, pool, brokers, cfg)}
		w := writers{goroutines: 3, transactions: 60, keys: 5, topic: topic, seed: 13}
		w.run(ctx, t, pool)
		requirePublished(t, pool, topic)
		execute := func(sql string, args ...any) {
			_, err := pool.Exec(ctx, sql, args...)
			require.NoError(t, err)
		}
		execute(expandSQL)
		stops = append(stops, running(t, pool, brokers, cfg)) // the schema is compatible

		execute(`INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'k', 'first'), ($1, 'k', 'second')`, missing)
		w.seed = 14
		w.run(ctx, t, pool)
		requirePublished(t, pool, topic)
		kafkatest.CreateTopic(t, missing, 1)
		execute(`INSERT INTO effectonce.outbox_scheduled (topic, key, payload, due_at) VALUES ($1, 'k', 'third', clock_timestamp())`, missing)
		for _, stop := range stops {
			stop()
		}
		_, err := relay.SetShards(ctx, pool, relay.Operator{Who: "ana", Why: "test"}, 3)
		require.NoError(t, err)
		running(t, pool, brokers, cfg)
		running(t, pool, brokers, cfg)
		w.seed = 15
		w.run(ctx, t, pool)
		// Leases are taken anew, under other epochs, as after any failure.
		execute(`UPDATE effectonce.outbox_progress SET epoch = epoch + 1, lease_until = NULL, owner = NULL`)
		w.seed = 16
		w.run(ctx, t, pool)
		requirePublished(t, pool, topic)
		eventually(t, "what waited is published", func() (bool, any) {
			got := distinct(t, missing)
			return len(got) == 3, got
		})
		require.Equal(t, []string{"first", "second", "third"}, distinct(t, missing))

		another, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(brokers...)}, cfg)
		require.NoError(t, err)
		execute(`UPDATE effectonce.schema_compatibility SET oldest = 1000`)
		require.ErrorIs(t, another.Run(ctx), migrations.ErrTooNew)
		execute(`UPDATE effectonce.schema_version SET version = version - 2`)
		require.ErrorIs(t, another.Run(ctx), migrations.ErrTooOld)
	})
}
