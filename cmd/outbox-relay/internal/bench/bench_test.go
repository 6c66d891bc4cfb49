package bench_test

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"testing"
	"time"

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
	require.ErrorContains(t, err, "there are 9 effects, 9 of them different, instead of 10")
	err = bench.Judge(t.Context(), on, 10, insert+`unnest(ARRAY[1, 2, 3, 4, 5, 6, 7, 8, 9, 9]) AS n`)
	require.ErrorContains(t, err, "there are 10 effects, 9 of them different, instead of 10")
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

// The benchmarks of the relay and of keys come to their end, with figures, and what was made on the
// servers is gone afterwards.
func TestBenchmarks(t *testing.T) {
	longtest.Only(t, "the benchmarks")
	t.Parallel()
	for _, c := range []struct {
		run  func(context.Context, bench.Options) (*bench.Report, error)
		keys []string
		row  string
	}{
		{bench.Relay, []string{"skip_locked", "bare_cursor", "relay", "exactly_once", "p50_ms", "p99_ms"}, `relay \(at least once\) +\d+ +\d+\.\.\d+ +rows/s`},
		{
			bench.Keys,
			[]string{"textbook", "without", "once", "flow", "replay", "bytes_per_key", "wal_bytes_per_key", "xids_per_key", "forgotten"},
			`replay \(a stored response\) +\d+ +\d+\.\.\d+ +requests/s`,
		},
	} {
		t.Run(c.keys[0], func(t *testing.T) {
			t.Parallel()
			testBenchmark(t, c.run, c.keys, c.row)
		})
	}
}

func testBenchmark(t *testing.T, run func(context.Context, bench.Options) (*bench.Report, error), keys []string, row string) {
	t.Helper()
	on := bench.Options{
		DatabaseURL: pgtest.EmptyDatabase(t), Brokers: kafkatest.Own(t).Brokers, Rows: bench.RowsMin, Requests: bench.RequestsMin,
		Statements: 3, Delay: time.Microsecond, Rounds: 2, Progress: func(string) {},
	}
	report, err := run(t.Context(), on)
	require.NoError(t, err)
	encoded, err := json.Marshal(report)
	require.NoError(t, err)
	var found map[string]any
	require.NoError(t, json.Unmarshal(encoded, &found))
	for _, key := range keys {
		assert.IsType(t, 0.0, found[key], key)
		assert.LessOrEqual(t, found[key+"_min"], found[key+"_max"], key)
	}
	var table bytes.Buffer
	require.NoError(t, report.WriteTable(&table))
	assert.Regexp(t, `(?m)^`+row+` +[\d.]+x$`, table.String())
	assert.Contains(t, table.String(), "are too few")
	var schemas int
	require.NoError(t, pgtest.Connect(t, on.DatabaseURL).QueryRow(t.Context(), `SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'effectonce%'`).Scan(&schemas))
	assert.Zero(t, schemas)
	kafkatest.Gone(t, on.Brokers)
}

// The picture is well-formed whatever the servers call themselves, and the longest bar of a unit has
// the whole width.
func TestPlot(t *testing.T) {
	t.Parallel()
	report := &bench.Report{Postgres: `<a> & "b"`, Figures: []bench.Figure{
		{Key: "textbook", Unit: "rows/s", Rounds: []float64{50, 100}},
		{Key: "relay", Unit: "rows/s", Rounds: []float64{200, 200}},
		{Key: "p50_ms", Unit: "ms", Digits: 2, Rounds: []float64{0.75}},
		{Key: "nothing", Unit: "bytes", Rounds: []float64{0, 0}},
	}}
	var picture bytes.Buffer
	require.NoError(t, report.WritePlot(&picture))
	var svg struct {
		Bars []struct {
			Rect struct {
				Width float64 `xml:"width,attr"`
			} `xml:"rect"`
			Texts []string `xml:"text"`
		} `xml:"g"`
	}
	require.NoError(t, xml.Unmarshal(picture.Bytes(), &svg))
	require.Len(t, svg.Bars, 4)
	assert.Equal(t, []string{"relay", "200"}, svg.Bars[1].Texts)
	assert.InDelta(t, 112.5, svg.Bars[0].Rect.Width, 0)
	assert.InDelta(t, 300, svg.Bars[1].Rect.Width, 0)
	assert.InDelta(t, 300, svg.Bars[2].Rect.Width, 0)
	assert.Zero(t, svg.Bars[3].Rect.Width)
}

func TestPercentile(t *testing.T) {
	t.Parallel()
	assert.InDelta(t, 2, bench.Percentile([]float64{3, 1, 2}, 0.5), 0)
	assert.InDelta(t, 2.5, bench.Percentile([]float64{4, 1, 2, 3}, 0.5), 1e-9)
	assert.InDelta(t, 7, bench.Percentile([]float64{7}, 0.99), 0)
}

func TestMain(m *testing.M) { pgtest.Main(m) }
