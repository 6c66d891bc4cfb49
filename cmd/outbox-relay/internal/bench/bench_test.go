package bench_test

import (
	"bytes"
	"encoding/json"
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
	on := bench.Options{DatabaseURL: pgtest.EmptyDatabase(t), Brokers: kafkatest.Brokers(t), Progress: func(string) {}}
	const insert = `INSERT INTO effectonce.bench_effects (account, body) SELECT 'a', convert_to(n::text, 'UTF8') FROM `
	require.NoError(t, bench.Judge(t.Context(), on, 10, insert+`generate_series(1, 10) AS n`))
	err := bench.Judge(t.Context(), on, 10, insert+`generate_series(1, 9) AS n`)
	require.ErrorContains(t, err, "10 messages had 9 effects, of 9 messages")
	err = bench.Judge(t.Context(), on, 10, insert+`unnest(ARRAY[1, 2, 3, 4, 5, 6, 7, 8, 9, 9]) AS n`)
	require.ErrorContains(t, err, "10 messages had 10 effects, of 9 messages")
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

// The benchmark of the relay comes to its end, with figures, and what was made on the servers is
// gone afterwards.
func TestRelay(t *testing.T) {
	longtest.Only(t, "the benchmark")
	t.Parallel()
	on := bench.Options{DatabaseURL: pgtest.EmptyDatabase(t), Brokers: kafkatest.Own(t).Brokers, Rows: bench.RowsMin, Rounds: 2, Progress: func(string) {}}
	report, err := bench.Relay(t.Context(), on)
	require.NoError(t, err)
	encoded, err := json.Marshal(report)
	require.NoError(t, err)
	var found map[string]any
	require.NoError(t, json.Unmarshal(encoded, &found))
	for _, key := range []string{"skip_locked", "bare_cursor", "relay", "exactly_once", "p50_ms", "p99_ms"} {
		assert.IsType(t, 0.0, found[key], key)
		assert.LessOrEqual(t, found[key+"_min"], found[key+"_max"], key)
	}
	var table bytes.Buffer
	require.NoError(t, report.WriteTable(&table))
	assert.Regexp(t, `(?m)^relay \(at least once\) +\d+ +\d+\.\.\d+ +rows/s +[\d.]+x$`, table.String())
	assert.Contains(t, table.String(), "are too few")
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

func TestMain(m *testing.M) { pgtest.Main(m) }
