package bench_test

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/bench"
)

func verdict(t *testing.T, r *bench.SoakReport, what string) bench.SoakVerdict {
	t.Helper()
	for _, v := range r.Verdicts {
		if v.What == what {
			return v
		}
	}
	t.Fatal("no verdict on ", what)
	return bench.SoakVerdict{}
}

// Property: a soak counts each order once in each group although relays and consumers are
// restarted, and its verdict sees goroutines and connections that restarts leave behind.
func TestSoak(t *testing.T) {
	t.Parallel()
	on := own(t)
	soak := func(plant bool) *bench.SoakReport {
		report, err := bench.Soak(t.Context(), bench.SoakOptions{
			Servers: on, Command: child(t), For: 10 * time.Second, Rate: 50,
		}.InHaste(100*time.Millisecond, 300*time.Millisecond, plant))
		require.NoError(t, err)
		assert.Positive(t, report.Orders)
		assert.Equal(t, []int64{report.Orders, report.Orders}, report.Handled)
		assert.Positive(t, report.Restarts)
		assert.NotEmpty(t, report.Samples)
		return report
	}
	clean := soak(false)
	if runtime.GOOS == "linux" {
		assert.Greater(t, clean.Samples[0].ResidentMB, 5.0)
	}
	planted := soak(true)
	assert.False(t, planted.Flat)
	assert.False(t, verdict(t, planted, "goroutines").Flat, "%+v", planted.Verdicts)
	assert.False(t, verdict(t, planted, "connections").Flat, "%+v", planted.Verdicts)
	// Some seconds of a busy machine may not be flat (TestSoakVerdict has what is), but they rise less.
	assert.Less(t, verdict(t, clean, "connections").Rise, verdict(t, planted, "connections").Rise)
	var table bytes.Buffer
	require.NoError(t, planted.WriteTable(&table))
	assert.Regexp(t, `(?m)^connections, number .*GROWS$`, table.String())
	assertDrawn(t, planted.SVG())
	assertNothingLeft(t, on)
}

// assertDrawn checks that a picture is well-formed.
func assertDrawn(t *testing.T, picture []byte) {
	t.Helper()
	decoder, elements := xml.NewDecoder(bytes.NewReader(picture)), 0
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		if _, is := token.(xml.StartElement); is {
			elements++
		}
	}
	assert.Greater(t, elements, 20)
	assert.NotContains(t, string(picture), "NaN")
}

// Property: the verdict sees a tenth more each half, and is not misled by a saw-tooth, by single
// peaks, or by what happens while everything starts.
func TestSoakVerdict(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	report := func(rise float64) *bench.SoakReport {
		r := &bench.SoakReport{}
		for i := range 720 {
			minute := float64(i) / 12
			s := bench.SoakSample{
				Minute: minute, ResidentMB: 200*(1+rise*minute/60) + 10*random.Float64(), HeapMB: 20, Goroutines: 150 + 10*random.Float64(), Connections: 20,
				DeadTuples: float64(i % 13 * 1000), OutboxMB: float64(i%7) * 10, KeysMB: 30, ClaimsMB: minute * 10, P50: 2, P99: 10,
			}
			if i < 60 {
				s.Goroutines, s.KeysMB = float64(i), float64(i)/2 // it starts
			}
			if i%50 == 0 {
				s.P99 = 1000
			}
			r.Samples = append(r.Samples, s)
		}
		r.Judge()
		return r
	}
	flat := report(0)
	assert.True(t, flat.Flat, "%+v", flat.Verdicts)
	assert.False(t, verdict(t, flat, "claims").Judged)
	grows := report(0.3)
	assert.False(t, grows.Flat)
	assert.False(t, verdict(t, grows, "resident memory").Flat)
	assert.True(t, verdict(t, grows, "goroutines").Flat)
	short := &bench.SoakReport{Samples: flat.Samples[:9]}
	short.Judge()
	assert.False(t, short.Flat, "nothing was seen")
	assert.NotEmpty(t, short.Notes)
}

func TestWrongSoak(t *testing.T) {
	t.Parallel()
	_, err := bench.Soak(t.Context(), bench.SoakOptions{Rate: -1})
	require.ErrorContains(t, err, "rate -1: want 1 to 10000")
	require.ErrorContains(t, err, "are required")
}
