package bench_test

import (
	"bytes"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/bench"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

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

// All scenarios of the relay's benchmark come to their end, with figures, and what was made on the
// servers is gone afterwards.
func TestScenarios(t *testing.T) {
	longtest.Only(t, "the benchmark")
	t.Parallel()
	on := bench.Servers{DatabaseURL: pgtest.EmptyDatabase(t), Brokers: kafkatest.Own(t).Brokers}
	program, err := os.Executable()
	require.NoError(t, err)
	scenarios, err := bench.ParseScenarios("all")
	require.NoError(t, err)
	report, err := bench.Relay(t.Context(), bench.WithShardPages(bench.RelayOptions{
		Servers: on, Rows: bench.RowsMin, Partitions: 2, Rounds: 1, LatencySeconds: 1, LargeRows: 2 * bench.RowsMin, IdleSeconds: 1,
		Command: []string{program, childArgument}, Scenarios: scenarios, BacklogRows: []int{2000, 5000}, ShardRows: 20_000,
	}, 20))
	require.NoError(t, err)
	assert.Len(t, report.Load, 6)
	assert.Len(t, report.Network, 3)
	assert.Len(t, report.Backlogs, 6)
	assert.Len(t, report.Shards, 3)
	var table bytes.Buffer
	require.NoError(t, report.WriteTable(&table))
	assert.Regexp(t, `(?m)^relay +\d+ +[\d.]+x$`, table.String())
	assert.Regexp(t, `(?m)^steady load, 500 a second, poller: median +[\d.]+ ms$`, table.String())
	var schemas int
	require.NoError(t, pgtest.Connect(t, on.DatabaseURL).QueryRow(t.Context(), `SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'effectonce%'`).Scan(&schemas))
	assert.Zero(t, schemas)
	kafkatest.Gone(t, on.Brokers)
}

func TestPercentile(t *testing.T) {
	t.Parallel()
	assert.InDelta(t, 2, bench.Percentile([]float64{3, 1, 2}, 0.5), 0)
	assert.InDelta(t, 2.5, bench.Percentile([]float64{4, 1, 2, 3}, 0.5), 1e-9)
	assert.InDelta(t, 7, bench.Percentile([]float64{7}, 0.99), 0)
}
