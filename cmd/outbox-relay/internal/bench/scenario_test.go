package bench_test

import (
	"bytes"
	"fmt"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/bench"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/relay"
)

// Every scenario that is not standard measures each of its ways, every message of a steady load
// arrives, and what was made on the servers is gone afterwards.
func TestScenarios(t *testing.T) {
	longtest.Only(t, "the benchmark")
	t.Parallel()
	on := own(t)
	scenarios, err := bench.ParseScenarios("load,backlog,network,pooler,shards")
	require.NoError(t, err)
	report, err := bench.Relay(t.Context(), bench.WithShardPages(bench.RelayOptions{
		Servers: on, Partitions: 2, Rounds: 1, LatencySeconds: 1, Command: child(t), Scenarios: scenarios,
		BacklogRows: []int{2000, 5000}, ShardRows: 20_000,
	}, 20))
	require.NoError(t, err)
	ways := func(figures []bench.LoadFigures) (found []string) {
		for _, f := range figures {
			found = append(found, f.Way+" "+strconv.Itoa(f.WantedPerSecond)+f.PgBouncer)
			require.NotNil(t, f.P50, f.Way)
			require.NotNil(t, f.P99, f.Way)
			assert.LessOrEqual(t, *f.P50, *f.P99, f.Way)
			assert.Positive(t, *f.PerSecond, f.Way)
			assert.Positive(t, *f.RoundTripMillis, f.Way)
			if runtime.GOOS == "linux" {
				assert.Positive(t, *f.CPU, f.Way)
			}
		}
		return found
	}
	assert.Equal(t, []string{"relay 500", "exactly_once 500", "poller 500", "relay 5000", "exactly_once 5000", "poller 5000"}, ways(report.Load))
	assert.Equal(t, []string{"relay 500", "exactly_once 500", "poller 500"}, ways(report.Network))
	for _, f := range report.Network {
		assert.GreaterOrEqual(t, *f.RoundTripMillis, 3.0, f.Way)
	}
	if found := ways(report.Pooler); pgBouncer() {
		assert.Equal(t, "relay 500none", found[0])
		assert.Contains(t, found, "relay 500not prepared")
	} else {
		assert.Empty(t, found)
	}
	var backlogs []string
	for _, f := range report.Backlogs {
		backlogs = append(backlogs, f.Way+" "+strconv.Itoa(f.Rows))
		assert.Positive(t, *f.Rate, f.Way)
		assert.Positive(t, *f.VsGapSafe, f.Way)
		assert.Positive(t, *f.VsSmallest, f.Way)
		if runtime.GOOS == "linux" {
			assert.NotNil(t, f.AboveIdle, f.Way)
		}
		assert.NotNil(t, f.HeapAboveIdle, f.Way)
	}
	assert.Equal(t, []string{
		"relay 2000", "gap_safe_cursor 2000", "exactly_once 2000", "relay 5000", "gap_safe_cursor 5000", "exactly_once 5000",
	}, backlogs)
	require.Len(t, report.Shards, 3)
	for i, f := range report.Shards {
		assert.Equal(t, 1<<i, f.Shards)
		assert.Positive(t, *f.Rate)
		assert.Positive(t, *f.VsOne)
	}
	for key := range object(t, report) {
		assert.NotRegexp(t, "^(relay|skip_locked|p50_ms|idle.*)$", key, "it was not asked for")
	}
	var table bytes.Buffer
	require.NoError(t, report.WriteTable(&table))
	assert.Regexp(t, `(?m)^steady load, 500 a second, poller: median +[\d.]+ ms$`, table.String())
	assertNothingLeft(t, on)
}

func pgBouncer() bool {
	for _, name := range []string{"pgbouncer", "/usr/sbin/pgbouncer"} {
		if _, err := exec.LookPath(name); err == nil {
			return true
		}
	}
	return false
}

// Names of scenarios and sizes are read from a flag; what is unknown is refused.
func TestParseScenarios(t *testing.T) {
	t.Parallel()
	all, standard := bench.Scenarios()
	for text, want := range map[string][]string{"": standard, "all": all, "load": {"load"}, "shards,load": {"shards", "load"}} {
		found, err := bench.ParseScenarios(text)
		require.NoError(t, err)
		assert.Equal(t, want, found)
	}
	for _, wrong := range []string{"everything", "load,", "load, idle", "all,load"} {
		_, err := bench.ParseScenarios(wrong)
		require.ErrorContains(t, err, "want all, or some of drain, process", wrong)
	}
	sizes, err := bench.ParseBacklogRows("1000000,10000000")
	require.NoError(t, err)
	assert.Equal(t, bench.BacklogRowsDefault(), sizes)
	for _, wrong := range []string{"", "1", "2000,", "2000;3000", "100000001"} {
		_, err := bench.ParseBacklogRows(wrong)
		require.ErrorContains(t, err, "want numbers from 2000 to 100000000", wrong)
	}
}

// The cursors that the relay is compared with make the same records as the relay, byte for byte.
func TestCursorsMakeTheRelaysRecords(t *testing.T) {
	t.Parallel()
	const rows = 12_000 // several pages
	pool, brokers := pgtest.Pool(t), kafkatest.Own(t).Brokers
	on := bench.Servers{DatabaseURL: pool.Config().ConnString(), Brokers: brokers}
	topic := kafkatest.TopicAt(t, brokers, 1)
	_, err := pool.Exec(t.Context(), `INSERT INTO effectonce.outbox (topic, key, payload, headers)
		SELECT $1, CASE WHEN n % 7 > 0 THEN convert_to('k' || n, 'UTF8') END, CASE n % 5 WHEN 0 THEN NULL WHEN 1 THEN '' ELSE convert_to('v' || n, 'UTF8') END,
		  CASE WHEN n % 3 = 0 THEN jsonb_build_object('n', n::text) ELSE '{}' END FROM generate_series(1, $2::int) AS n`, topic, rows)
	require.NoError(t, err)
	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(brokers...)}, relay.Config{})
	require.NoError(t, err)
	_, err = r.Drain(t.Context())
	require.NoError(t, err)
	for _, gapSafe := range []bool{true, false} {
		n, err := bench.Cursor(t.Context(), on, "effectonce", rows, gapSafe)
		require.NoError(t, err)
		require.EqualValues(t, rows, n)
	}
	records := kafkatest.ReadAllAt(t, brokers, topic)
	require.Len(t, records, 3*rows)
	for i, want := range records[:rows] {
		for _, found := range []*kgo.Record{records[rows+i], records[2*rows+i]} {
			require.Equal(t, want.Key, found.Key)
			require.Equal(t, want.Value, found.Value)
			require.Equal(t, want.Headers, found.Headers)
		}
	}
}

// The gap-safe cursor waits for a transaction that is open elsewhere, and then has every row.
func TestGapSafeCursorWaits(t *testing.T) {
	t.Parallel()
	server := pgtest.Cluster(t, nil) // a snapshot is of the whole server
	pgtest.Migrate(t, server.URL)
	brokers := kafkatest.Own(t).Brokers
	topic := kafkatest.TopicAt(t, brokers, 1)
	conn, open := pgtest.Connect(t, server.URL), pgtest.Connect(t, server.URL)
	tx, err := open.Begin(t.Context())
	require.NoError(t, err)
	const insert = "INSERT INTO effectonce.outbox (topic, payload) SELECT $1, convert_to(n::text, 'UTF8') FROM generate_series(1, 10) AS n"
	_, err = tx.Exec(t.Context(), insert, topic)
	require.NoError(t, err)
	pgtest.Exec(t, conn, insert, topic)
	done := make(chan error, 1)
	go func() {
		n, err := bench.Cursor(t.Context(), bench.Servers{DatabaseURL: server.URL, Brokers: brokers}, "effectonce", 20, true)
		if err == nil && n != 20 {
			err = fmt.Errorf("%d rows", n)
		}
		done <- err
	}()
	require.Eventually(t, func() bool { // it looks and finds nothing
		var looked bool
		err := conn.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE query LIKE '-- bench.gap_safe_cursor%' AND state = 'idle')").Scan(&looked)
		return err == nil && looked
	}, 2*time.Minute, 5*time.Millisecond)
	select {
	case err := <-done:
		t.Fatal("it did not wait: ", err)
	default:
	}
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, <-done)
	require.Len(t, kafkatest.ReadAllAt(t, brokers, topic), 20)
}

// A database at a distance answers no sooner than after the round trip, and what goes through is
// what was sent.
func TestDistance(t *testing.T) {
	t.Parallel()
	const roundTrip = 4 * time.Millisecond
	address, stop, err := bench.Distance(t.Context(), pgtest.EmptyDatabase(t), roundTrip)
	require.NoError(t, err)
	defer stop()
	found, err := bench.RoundTrip(t.Context(), address)
	require.NoError(t, err)
	assert.GreaterOrEqual(t, found, 4.0)
	conn, err := pgx.Connect(t.Context(), address)
	require.NoError(t, err)
	var back string
	sent := strings.Repeat("0123456789", 300_000)
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT $1::text", sent).Scan(&back))
	assert.Equal(t, sent, back)
	stop()
	err = conn.Ping(t.Context())
	require.Error(t, err, "the way is closed")
	_ = conn.Close(t.Context())
	_, err = bench.RoundTrip(t.Context(), address)
	require.Error(t, err)
}

// Any form of an address can be led through a port of this machine.
func TestThrough(t *testing.T) {
	t.Parallel()
	for _, address := range []string{
		"postgres://me:secret@db.example:5433/shop?sslmode=disable", "postgres:///shop?host=/run/postgresql&port=5433&user=me&password=secret",
		"host=db.example port=5433 user=me password=secret dbname=shop",
	} {
		config, err := pgx.ParseConfig(bench.Through(address, 1234))
		require.NoError(t, err)
		assert.Equal(t, "127.0.0.1", config.Host, address)
		assert.EqualValues(t, 1234, config.Port)
		assert.Equal(t, "shop", config.Database)
		assert.Equal(t, "me", config.User)
		assert.Equal(t, "secret", config.Password)
	}
}

// What a server on this machine uses is counted, also by backends that have ended; of another one
// nothing is said.
func TestServerCPU(t *testing.T) {
	longtest.Only(t, "the benchmark")
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("LOUD SKIP: not tested, processes are read from /proc")
	}
	server := pgtest.Cluster(t, nil)
	conn, err := pgx.Connect(t.Context(), server.URL)
	require.NoError(t, err)
	defer func() { _ = conn.Close(t.Context()) }()
	look, err := bench.ServerCPU(t.Context(), conn)
	require.NoError(t, err)
	before := look()
	require.NotNil(t, before)
	const burnt = 0.02 // seconds at least, on a machine that is busy
	last := *before
	for range 3 {
		other, err := pgx.Connect(t.Context(), server.URL)
		require.NoError(t, err)
		_, err = other.Exec(t.Context(), `DO $$ DECLARE until timestamptz := clock_timestamp() + interval '1 second'; BEGIN WHILE clock_timestamp() < until LOOP END LOOP; END $$`)
		require.NoError(t, err)
		require.NoError(t, other.Close(t.Context()))
		now := look()
		require.NotNil(t, now)
		require.Greater(t, *now, last+burnt)
		last = *now
	}
	require.NoError(t, server.Stop(t.Context()))
	require.Nil(t, look())
}
