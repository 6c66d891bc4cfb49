package bench_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/bench"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// own returns servers on which nothing is but what the benchmark makes.
func own(t *testing.T) bench.Servers {
	t.Helper()
	return bench.Servers{DatabaseURL: pgtest.EmptyDatabase(t), Brokers: kafkatest.Own(t).Brokers}
}

// assertNothingLeft looks for what a benchmark should have removed.
func assertNothingLeft(t *testing.T, on bench.Servers) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), on.DatabaseURL)
	require.NoError(t, err)
	defer func() { assert.NoError(t, conn.Close(t.Context())) }()
	var schemas int
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'effectonce%'`).Scan(&schemas))
	assert.Zero(t, schemas, "schemas")
	kafkatest.Gone(t, on.Brokers)
}

// object reads a report as a script would.
func object(t *testing.T, report any) map[string]any {
	t.Helper()
	text, err := json.Marshal(report)
	require.NoError(t, err)
	var found map[string]any
	require.NoError(t, json.Unmarshal(text, &found))
	return found
}

// Every variant of the consumer runs in every round, gives each message one effect (Consume itself
// counts them), and has its key; what it made on the servers is gone afterwards.
func TestConsume(t *testing.T) {
	longtest.Only(t, "the benchmark")
	t.Parallel()
	on := own(t)
	var lines []string
	report, err := bench.Consume(t.Context(), bench.ConsumeOptions{
		Servers: on, Messages: bench.MessagesMin, Partitions: 2, Rounds: 2, Preload: 5000,
		Progress: func(line string) { lines = append(lines, line) },
	})
	require.NoError(t, err)
	found := object(t, report)
	for _, key := range []string{
		"textbook", "statement", "by_id", "no_dedup", "all_duplicates",
		"statement_vs_textbook", "by_id_vs_textbook", "by_id_vs_no_dedup", "bytes_per_message",
		"round_trip_us", "commit_us",
		"textbook_parallel", "watermill", "hand_loop", "by_position", "batch_copy", "parked_key", "bytes_per_message_interleaved",
		"by_id_vs_textbook_parallel", "by_id_vs_watermill", "by_id_vs_hand_loop", "by_position_vs_no_dedup", "parked_key_vs_by_id",
		"all_duplicates_vs_by_id", "dedup_cost_uuid7", "dedup_cost_random",
	} {
		assert.Greater(t, found[key], 0.0, key)
	}
	// The log is the whole server's, where other tests write too: any number may come out.
	assert.Contains(t, found, "wal_bytes_per_message")
	for key, want := range map[string]int{"messages": bench.MessagesMin, "partitions": 2, "rounds": 2} {
		assert.InDelta(t, want, found[key], 0, key)
	}
	all := strings.Join(lines, "\n")
	for _, variant := range []string{"textbook", "textbook_parallel", "watermill", "statement", "by_id", "no_dedup", "all_duplicates", "hand_loop", "by_position", "batch_copy", "parked_key", "stream"} {
		assert.Contains(t, all, "round 1: "+variant)
		assert.Contains(t, all, "round 2: "+variant)
	}
	const note = "2000 messages are too few: rates and ratios of such a run are noise; use --messages 50000 or more"
	assert.Equal(t, []any{note}, found["notes"])
	var table bytes.Buffer
	require.NoError(t, report.WriteTable(&table))
	assert.Contains(t, table.String(), "\nnote: "+note+"\n")
	assert.Regexp(t, `(?m)^engine, statements queued +\d+ +[\d.]+x$`, table.String())
	assert.Regexp(t, `(?m)^claim, table and index, one stream +\d+ bytes a message$`, table.String())
	assertNothingLeft(t, on)
}

// child is a relay's process that the test binary plays.
func child(t *testing.T) []string {
	t.Helper()
	program, err := os.Executable()
	require.NoError(t, err)
	return []string{program, childArgument}
}

// Every variant of the relay gets every row to Kafka once (Relay itself counts them), every message
// of the latencies arrives, a relay alone in a process is measured busy, idle and on a larger
// backlog, and what was made on the servers is gone afterwards.
func TestRelay(t *testing.T) {
	longtest.Only(t, "the benchmark")
	t.Parallel()
	on := own(t)
	report, err := bench.Relay(t.Context(), bench.RelayOptions{
		Servers: on, Rows: bench.RowsMin, Partitions: 2, Rounds: 2, LatencySeconds: 1,
		LargeRows: 2 * bench.RowsMin, IdleSeconds: 1, Command: child(t),
	})
	require.NoError(t, err)
	found := object(t, report)
	for _, key := range []string{
		"skip_locked", "bare_cursor", "relay", "relay_vs_skip_locked", "relay_vs_bare_cursor", "exactly_once", "exactly_once_vs_relay", "p99_ms",
		"cpu_seconds_per_million", "cpu_seconds_per_million_without_metrics", "cpu_seconds_per_million_exactly_once",
		"idle_queries_per_second", "relay_process", "large_relay_process", "large_vs_relay_process", "large_cpu_seconds_per_million",
	} {
		assert.Greater(t, found[key], 0.0, key)
	}
	assert.Contains(t, found, "p50_ms")
	assert.Less(t, found["idle_queries_per_second"], 50.0, "that is no idle relay")
	assert.Less(t, found["idle_cpu_percent"], 100.0)
	if runtime.GOOS == "linux" {
		for _, key := range []string{"memory_mb", "memory_mb_exactly_once", "large_memory_mb"} {
			assert.Greater(t, found[key], 5.0, key)
		}
	}
	for key, want := range map[string]int{"rows": bench.RowsMin, "large_rows": 2 * bench.RowsMin, "partitions": 2, "rounds": 2, "latency_seconds": 1, "payload_bytes": 256} {
		assert.InDelta(t, want, found[key], 0, key)
	}
	var table bytes.Buffer
	require.NoError(t, report.WriteTable(&table))
	assert.Regexp(t, `(?m)^relay +\d+ +[\d.]+x$`, table.String())
	assert.Regexp(t, `(?m)^from commit to consumable, median +[\d.]+ ms$`, table.String())
	assertNothingLeft(t, on)
}

// Figures that need a separate process are left out without one, and a process that does not do its
// job gives no figure, but an error with its output.
func TestRelayProcess(t *testing.T) {
	t.Parallel()
	options := bench.RelayOptions{Servers: own(t), Rows: bench.RowsMin, Partitions: 1, Rounds: 1, LatencySeconds: 1, LargeRows: 5000}
	report, err := bench.Relay(t.Context(), options)
	require.NoError(t, err)
	for key := range object(t, report) {
		assert.NotRegexp(t, "cpu|memory|idle|process|large", key)
	}
	options.Command = []string{child(t)[0], "-test.bogus"}
	_, err = bench.Relay(t.Context(), options)
	require.ErrorContains(t, err, "the relay's process: exit status 2: flag provided but not defined: -test.bogus")
	require.ErrorContains(t, bench.RelayProcess(t.Context(), strings.NewReader(""), io.Discard, nil), "not by people")
	assertNothingLeft(t, options.Servers)
}

// A run that lost or doubled an effect gives no figure but an error.
func TestALostOrDoubledEffectIsNoFigure(t *testing.T) {
	t.Parallel()
	on := bench.Servers{DatabaseURL: pgtest.EmptyDatabase(t), Brokers: kafkatest.Brokers(t)}
	const insert = `INSERT INTO effectonce.bench_effects (account, body) SELECT 'a', convert_to(n::text, 'UTF8') FROM `
	require.NoError(t, bench.Judge(t.Context(), on, 10, insert+`generate_series(1, 10) AS n`))
	err := bench.Judge(t.Context(), on, 10, insert+`generate_series(1, 9) AS n`)
	require.ErrorContains(t, err, "10 messages had 9 effects, of 9 messages")
	err = bench.Judge(t.Context(), on, 10, insert+`unnest(ARRAY[1, 2, 3, 4, 5, 6, 7, 8, 9, 9]) AS n`)
	require.ErrorContains(t, err, "10 messages had 10 effects, of 9 messages")
}

// A benchmark that is interrupted ends at once and removes what it made.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	on := own(t)
	ctx, cancel := context.WithCancel(t.Context())
	_, err := bench.Consume(ctx, bench.ConsumeOptions{
		Servers: on, Messages: bench.MessagesMin, Rounds: bench.RoundsMax,
		Progress: func(line string) {
			if strings.HasPrefix(line, "round 1") {
				cancel()
			}
		},
	})
	require.ErrorIs(t, err, context.Canceled)
	assertNothingLeft(t, on)
}

// Wrong options are all reported at once, before anything is touched.
func TestWrongOptions(t *testing.T) {
	t.Parallel()
	_, err := bench.Consume(t.Context(), bench.ConsumeOptions{Messages: 1, Partitions: 1000, Rounds: -1})
	for _, part := range []string{"messages 1: want 2000 to 5000000", "partitions 1000: want 1 to 100", "rounds -1: want 1 to 25", "are required"} {
		require.ErrorContains(t, err, part)
	}
	_, err = bench.Relay(t.Context(), bench.RelayOptions{Rows: 1, LatencySeconds: 1000, LargeRows: -1, IdleSeconds: 601})
	for _, part := range []string{
		"rows 1: want 2000 to 5000000", "large rows -1: want 0 to 100000000", "idle seconds 601: want 1 to 600", "latency seconds 1000: want 1 to 600", "are required",
	} {
		require.ErrorContains(t, err, part)
	}
}

// Servers that do not answer cause an error that names them, without a complaint about what could
// not be removed there.
func TestNoServer(t *testing.T) {
	t.Parallel()
	_, err := bench.Relay(t.Context(), bench.RelayOptions{Servers: bench.Servers{
		DatabaseURL: "postgres://nobody@127.0.0.1:1/nowhere?connect_timeout=2", Brokers: []string{"127.0.0.1:1"},
	}})
	require.ErrorContains(t, err, "connect to PostgreSQL")
	assert.NotContains(t, err.Error(), "still exist")
}

// The rate is that between the first commit and the last; a single commit has none.
func TestRate(t *testing.T) {
	t.Parallel()
	rate, done, err := bench.Rate(30, 10, 10, 10)
	require.NoError(t, err)
	assert.True(t, done)
	assert.Positive(t, rate)
	_, done, err = bench.Rate(20, 10)
	require.ErrorContains(t, err, "take more messages")
	assert.False(t, done)
}

func TestPercentile(t *testing.T) {
	t.Parallel()
	assert.InDelta(t, 2, bench.Percentile([]float64{3, 1, 2}, 0.5), 0)
	assert.InDelta(t, 2.5, bench.Percentile([]float64{4, 1, 2, 3}, 0.5), 1e-9)
	assert.InDelta(t, 99.01, bench.Percentile(hundred(), 0.99), 1e-9)
	assert.InDelta(t, 7, bench.Percentile([]float64{7}, 0.99), 0)
}

func hundred() (values []float64) {
	for i := range 100 {
		values = append(values, float64(100-i))
	}
	return values
}
