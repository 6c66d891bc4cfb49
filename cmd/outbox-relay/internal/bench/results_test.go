package bench_test

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/bench"
)

// Property: each part gives each way its figures with their spread, judged by what the ways did,
// and what was made on the servers is gone afterwards.
func TestMeasure(t *testing.T) {
	t.Parallel()
	on := own(t)
	results, err := bench.Measure(t.Context(), bench.MeasureOptions{
		Servers: on, Command: child(t), Parts: bench.Parts(), Rounds: 1, Claims: []int{0, 2000}, Rows: []int{2000, 4000},
	}.Scaled(100))
	require.NoError(t, err)
	names := map[string]int{}
	for _, p := range results.Plots {
		for _, s := range p.Series {
			names[p.Name] += len(s.Points)
			for _, point := range s.Points {
				assert.LessOrEqual(t, point.Min, point.Median, p.Name)
				assert.LessOrEqual(t, point.Median, point.Max, p.Name)
			}
		}
		assertDrawn(t, bench.SVG(p.Title, 1, p))
	}
	for name, points := range map[string]int{
		"consumer": 3, "relay": 3, "consumer-wal": 3, "relay-wal": 3, "keys": 12, "keys-wal": 8, "network-consumer": 6, "network-relay": 6, "network-keys": 9,
		"latency-p50": 6, "latency-p99": 6, "growth-claims": 4, "growth-claims-bytes": 2, "growth-claims-pages": 2, "growth-outbox": 4,
	} {
		assert.Equal(t, points, names[name], name)
	}
	var table bytes.Buffer
	require.NoError(t, results.WriteTable(&table))
	assert.Regexp(t, `(?m)^2 statements, Once .* of no keys`, table.String())
	assertNothingLeft(t, on)
}

func with(lessIsBetter bool, ratio bench.Spread) *bench.Results {
	return &bench.Results{Plots: []*bench.Plot{{Name: "p", LessIsBetter: lessIsBetter, Series: []bench.Series{
		{Name: "s", Against: "t", Points: []bench.Point{{At: "here", Ratio: &ratio}}},
	}}}}
}

// Property: a ratio that is worse in all rounds by more than a tenth fell; what the spreads
// explain, what is better and what was not measured before did not.
func TestFell(t *testing.T) {
	t.Parallel()
	before := bench.Spread{Median: 4, Min: 3.5, Max: 4.5}
	for _, c := range []struct {
		now        bench.Spread
		less, fell bool
	}{
		{bench.Spread{Median: 3, Min: 2.8, Max: 3.4}, false, true},
		{bench.Spread{Median: 3, Min: 2.8, Max: 3.6}, false, false},
		{bench.Spread{Median: 5, Min: 4.6, Max: 6}, false, false},
		{bench.Spread{Median: 5, Min: 4.6, Max: 6}, true, true},
		{bench.Spread{Median: 3, Min: 2.8, Max: 3.4}, true, false},
	} {
		fell, compared := with(c.less, c.now).Fell(with(c.less, before))
		assert.Equal(t, 1, compared)
		assert.Equal(t, c.fell, len(fell) == 1, "%+v", c)
	}
	other := with(false, before)
	other.Plots[0].Name = "other"
	_, compared := other.Fell(with(false, before))
	assert.Zero(t, compared)
}
