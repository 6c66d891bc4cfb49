package bench

import "slices"

// soakFigure is a figure of a soak. In the second half of the judged time it may rise by a share of
// its level in the first half, or by an amount below which a rise means nothing.
type soakFigure struct {
	what, unit string
	of         func(SoakSample) float64
	share      float64
	amount     float64 // 0: it is not judged
}

func soakFigures() []soakFigure {
	return []soakFigure{
		{"resident memory", "MB", func(s SoakSample) float64 { return s.ResidentMB }, 0.1, 8},
		{"live heap", "MB", func(s SoakSample) float64 { return s.HeapMB }, 0.1, 4},
		{"goroutines", "number", func(s SoakSample) float64 { return s.Goroutines }, 0.05, 8},
		{"connections", "number", func(s SoakSample) float64 { return s.Connections }, 0.1, 3},
		{"dead tuples", "number", func(s SoakSample) float64 { return s.DeadTuples }, 0.25, 2000},
		{"outbox", "MB", func(s SoakSample) float64 { return s.OutboxMB }, 0.15, 4},
		{"idempotency keys", "MB", func(s SoakSample) float64 { return s.KeysMB }, 0.15, 4},
		{"claims", "MB", func(s SoakSample) float64 { return s.ClaimsMB }, 0, 0},
		{"median latency", "ms", func(s SoakSample) float64 { return s.P50 }, 0.5, 2},
		{"99th percentile of the latency", "ms", func(s SoakSample) float64 { return s.P99 }, 0.5, 50},
	}
}

// SoakVerdict says whether a figure grew.
type SoakVerdict struct {
	What    string  `json:"what"`
	Unit    string  `json:"unit"`
	Judged  bool    `json:"judged"`
	Flat    bool    `json:"flat"`
	Level   float64 `json:"level"`                  // median of the first half
	First   float64 `json:"slope_first_half"`       // per minute
	Second  float64 `json:"slope_second_half"`      // per minute
	Rise    float64 `json:"rise_in_second_half"`    // the slope times the length
	Allowed float64 `json:"allowed_in_second_half"` // the larger of amount and share of the level
}

// soakWarmUp is the share of the samples, from the first one, that is not judged: tables and pools
// reach their size. At most soakWarmUpMax minutes.
const (
	soakWarmUp    = 0.2
	soakWarmUpMax = 5.0
)

// judge compares the two halves of the samples behind the warm-up.
func (r *SoakReport) judge() {
	r.Flat, r.Verdicts = true, nil
	judged := r.Samples
	if n := len(judged); n > 0 {
		warm := min(soakWarmUp*judged[n-1].Minute, soakWarmUpMax)
		judged = judged[slices.IndexFunc(judged, func(s SoakSample) bool { return s.Minute >= warm }):]
	}
	const telling = 10 // samples
	if len(judged) < telling {
		r.Flat = false
		r.Notes = append(r.Notes, "too few samples for a verdict")
		return
	}
	first, second := judged[:len(judged)/2], judged[len(judged)/2:]
	for _, f := range soakFigures() {
		level := percentile(valuesOf(first, f.of), 0.5)
		slope := slopeOf(second, f.of)
		rise := slope * (second[len(second)-1].Minute - second[0].Minute)
		v := SoakVerdict{
			What: f.what, Unit: f.unit, Judged: f.amount > 0, Level: shown(level), First: shown(slopeOf(first, f.of)), Second: shown(slope),
			Rise: shown(rise), Allowed: shown(max(f.amount, f.share*level)),
		}
		v.Flat = rise <= max(f.amount, f.share*level)
		r.Flat = r.Flat && (v.Flat || !v.Judged)
		r.Verdicts = append(r.Verdicts, v)
	}
}

func valuesOf(samples []SoakSample, of func(SoakSample) float64) []float64 {
	values := make([]float64, len(samples))
	for i, s := range samples {
		values[i] = of(s)
	}
	return values
}

// slopePoints bounds the work of slopeOf.
const slopePoints = 400

// slopeOf returns the change per minute by Theil and Sen: the median of the slopes between all
// pairs of samples, which single peaks do not change.
// https://en.wikipedia.org/wiki/Theil%E2%80%93Sen_estimator
func slopeOf(samples []SoakSample, of func(SoakSample) float64) float64 {
	var slopes []float64
	stride := len(samples)/slopePoints + 1
	for i := 0; i < len(samples); i += stride {
		for j := i + stride; j < len(samples); j += stride {
			if minutes := samples[j].Minute - samples[i].Minute; minutes > 0 {
				slopes = append(slopes, (of(samples[j])-of(samples[i]))/minutes)
			}
		}
	}
	if len(slopes) == 0 {
		return 0
	}
	return percentile(slopes, 0.5)
}
