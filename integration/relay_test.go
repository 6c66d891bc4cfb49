package integration_test

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/relay"
)

// Property: whatever the order of transaction ids, row numbers and commits, and while a transaction
// somewhere in the cluster stays open for the whole run, every committed row is published once, no
// rolled-back row is, versions of a key arrive in commit order, and rows keep flowing. Rows O1, O2, O3,
// O4, O6, O7.
func TestRelayKeepsCommitOrderBehindABystander(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	url := pgtest.Cluster(t, nil).URL
	pgtest.Migrate(t, url)
	pool := open(t, url)
	createWorkload(t, pool)
	topic := kafkatest.Topic(t, 4)

	// The bystander has a transaction id and a snapshot, and does nothing.
	bystander, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer bystander.Rollback(context.WithoutCancel(ctx))
	_, err = bystander.Exec(ctx, `SELECT pg_current_xact_id()`)
	require.NoError(t, err)

	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}, relay.Config{})
	require.NoError(t, err)
	running, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- r.Run(running) }()

	transactions := 6000
	if testing.Short() {
		t.Log("-short: 1,200 transactions instead of 6,000")
		transactions = 1200
	}
	writers{goroutines: 24, transactions: transactions, keys: 20, topic: topic, seed: 1, pauses: true}.run(ctx, t, pool)

	// Everything flows while the bystander is still open.
	want := written(ctx, t, pool)
	total := 0
	for _, version := range want {
		total += version
	}
	eventually(t, 30*time.Second, "rows published while the bystander is open", func() (bool, any) {
		n := count(ctx, t, pool, `SELECT coalesce(sum(published), 0) FROM effectonce.outbox_progress`)
		return n >= total, fmt.Sprintf("%d of %d", n, total)
	})
	require.NoError(t, bystander.Rollback(ctx))
	stop()
	require.NoError(t, <-done)

	s := judge(t, kafkatest.ReadAll(t, topic))
	require.Equal(t, want, s.last)
	require.Empty(t, s.missing)
	require.Zero(t, s.inversions)
	require.Zero(t, s.duplicates, "without a crash nothing is published twice")
}

// Property: a relay that is killed at any point between two durable steps, and started again, loses no
// row and changes no order among first occurrences; it publishes again at most what was in flight.
// Row O8, and O9: progress never gets ahead of the acknowledgement.
func TestRelayKilledAtEachPointLosesNothing(t *testing.T) {
	t.Parallel()
	for _, point := range []string{crashpoint.RelayRead, crashpoint.RelayProduced, crashpoint.RelayAcknowledged, crashpoint.RelayProgressed} {
		for _, after := range []int{0, 2} {
			t.Run(fmt.Sprintf("%s/%d", point, after), func(t *testing.T) {
				t.Parallel()
				ctx := t.Context()
				url := pgtest.Database(t)
				pool := open(t, url)
				createWorkload(t, pool)
				topic := kafkatest.Topic(t, 2)
				c := child{Role: "relay", URL: url, Brokers: kafkatest.Brokers(t), Lease: time.Second, CrashAt: point, CrashAfter: after}
				first := start(t, c)
				// Written until it happens: how many pages a few rows make is up to the scheduler.
				eventually(t, 20*time.Second, "the relay reaches its crash point", func() (bool, any) {
					writers{goroutines: 4, transactions: 80, keys: 5, topic: topic, seed: 2}.run(ctx, t, pool)
					return first.ended(), first.log
				})
				require.ErrorContains(t, first.err, "killed")

				c.CrashAt = ""
				second := start(t, c)
				requirePublished(t, pool, topic)
				require.NoError(t, second.terminate())
			})
		}
	}
}

// Property: killed and frozen at random moments under load, with a second relay waiting, relays lose
// nothing and keep the order of first occurrences.
func TestRelaysKilledAndFrozenAtRandomMoments(t *testing.T) {
	t.Parallel()
	rounds := 12
	if testing.Short() {
		t.Log("-short: 3 rounds instead of 12")
		rounds = 3
	}
	ctx := t.Context()
	url := pgtest.Database(t)
	pool := open(t, url)
	createWorkload(t, pool)
	topic := kafkatest.Topic(t, 3)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	c := child{Role: "relay", URL: url, Brokers: kafkatest.Brokers(t), Lease: time.Second}
	relays := []*process{start(t, c), start(t, c)}
	for round := range rounds {
		writers{goroutines: 6, transactions: 300, keys: 7, topic: topic, seed: seed + uint64(round), pauses: round%2 == 0}.run(ctx, t, pool)
		i := random.IntN(len(relays))
		if random.IntN(3) > 0 {
			relays[i].kill()
			relays[i] = start(t, c)
			continue
		}
		// Frozen beyond its lease: the other one takes over; then both run.
		relays[i].signal(syscall.SIGSTOP)
		requirePublished(t, pool, topic)
		relays[i].signal(syscall.SIGCONT)
	}
	requirePublished(t, pool, topic)
	for _, r := range relays {
		require.NoError(t, r.terminate())
	}
	s := judge(t, kafkatest.ReadAll(t, topic))
	t.Logf("%d records, %d of them duplicates", s.records, s.duplicates)
}

// Property: the memory of a relay that finds a backlog does not grow with the backlog.
func TestBacklogDrainsInBoundedMemory(t *testing.T) {
	t.Parallel()
	large := 1_000_000
	if testing.Short() {
		t.Log("-short: a backlog of 200,000 rows instead of 1,000,000")
		large = 200_000
	}
	small := drainBacklog(t, 50_000)
	big := drainBacklog(t, large)
	t.Logf("peak memory: %d MB for 50,000 rows, %d MB for %d rows", small>>20, big>>20, large)
	require.Less(t, big, int64(300<<20))
	require.Less(t, big, 2*small+64<<20)
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
	p := start(t, child{Role: "relay", URL: url, Brokers: kafkatest.Brokers(t), Lease: 10 * time.Second})
	eventually(t, 3*time.Minute, "the backlog drains", func() (bool, any) {
		n := count(ctx, t, pool, `SELECT coalesce(sum(published), 0) FROM effectonce.outbox_progress`)
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
	if os.IsNotExist(err) {
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
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// requirePublished waits until the topic has every committed version, and judges it.
func requirePublished(t *testing.T, pool *pgxpool.Pool, topic string) {
	t.Helper()
	ctx := t.Context()
	want := written(ctx, t, pool)
	var s stream
	eventually(t, 40*time.Second, "everything is published", func() (bool, any) {
		var waiting int
		err := pool.QueryRow(ctx, `SELECT count(*) FROM effectonce.outbox o, effectonce.outbox_progress p JOIN effectonce.outbox_ticks t USING (tick)
			WHERE o.seq > p.floor AND NOT pg_visible_in_snapshot(o.txid, t.snapshot)`).Scan(&waiting)
		require.NoError(t, err)
		return waiting == 0 && count(ctx, t, pool, `SELECT count(*) FROM effectonce.outbox_progress`) > 0, waiting
	})
	s = judge(t, kafkatest.ReadAll(t, topic))
	require.Equal(t, want, s.last)
	require.Empty(t, s.missing)
	require.Zero(t, s.inversions)
}
