package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"time"
)

// Bounds and defaults of SoakOptions.
const (
	SoakMinutesMin     = 1
	SoakMinutesDefault = 60
	SoakMinutesMax     = 7 * 24 * 60

	SoakRateMin     = 1
	SoakRateDefault = 200
	SoakRateMax     = 10_000
)

const (
	soakSampleEvery = 5 * time.Second
	soakChurnEvery  = 7 * time.Second
	soakPartitions  = 6
)

// SoakOptions are the options of Soak. Servers and Command are required.
type SoakOptions struct {
	Servers

	// Command starts a process that calls RelayProcess.
	Command []string
	// For is how long samples are taken. Default 1 h.
	For time.Duration
	// Rate of requests per second. 1 to 10,000; default 200.
	Rate int
	// Progress gets one line at a time. Default: none.
	Progress func(line string)

	sample, churn time.Duration // for tests
	plant         bool
}

// Soak runs requests under idempotency keys, relays and consumers at a steady rate, restarts them
// in turns, and samples what they use. Nothing may grow.
func Soak(ctx context.Context, opts SoakOptions) (_ *SoakReport, err error) {
	opts.For, opts.Rate = cmp.Or(opts.For, SoakMinutesDefault*time.Minute), cmp.Or(opts.Rate, SoakRateDefault)
	opts.sample, opts.churn = cmp.Or(opts.sample, soakSampleEvery), cmp.Or(opts.churn, soakChurnEvery)
	if opts.Progress == nil {
		opts.Progress = func(string) {}
	}
	if err := errors.Join(opts.check(), inBounds("rate", opts.Rate, SoakRateMin, SoakRateMax)); err != nil {
		return nil, err
	}
	s, err := newSite(ctx, opts.Servers)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.remove(ctx)) }()
	topic, err := s.topic(ctx, "soak", soakPartitions)
	if err != nil {
		return nil, err
	}
	if err := s.exec(ctx, "create the soak's table", soakTableSQL); err != nil {
		return nil, err
	}
	for _, group := range soakGroups() {
		s.group(group)
	}
	report := &SoakReport{Rate: opts.Rate, Minutes: shown(opts.For.Minutes())}
	progress, err := s.topic(ctx, "progress", 1)
	if err != nil {
		return nil, err
	}
	b := &relayBench{site: s, progress: progress, opts: RelayOptions{Command: opts.Command}, sampled: func(sample SoakSample) {
		report.Samples = append(report.Samples, sample.rounded())
		opts.Progress(sample.String())
	}}
	opts.Progress(fmt.Sprintf("%d requests a second for %v; a relay or a consumer is restarted every %v", opts.Rate, opts.For, opts.churn))
	found, err := b.process(ctx, relayJob{Soak: &soakJob{
		Topic: topic, Rate: opts.Rate, For: opts.For, Sample: opts.sample, Churn: opts.churn, Plant: opts.plant,
	}})
	if err != nil {
		return nil, err
	}
	report.SoakFound = *found.Soak
	report.judge()
	return report, nil
}

// SoakSample is what was seen at one moment. Memory, goroutines and connections are those of the
// process with writers, relays and consumers; sizes are with indexes.
type SoakSample struct {
	Minute      float64 `json:"minute"`
	ResidentMB  float64 `json:"resident_mb"`
	HeapMB      float64 `json:"heap_mb"` // that the last collection found alive
	Goroutines  float64 `json:"goroutines"`
	Connections float64 `json:"connections"` // to the database
	DeadTuples  float64 `json:"dead_tuples"`
	OutboxMB    float64 `json:"outbox_mb"`
	KeysMB      float64 `json:"keys_mb"`
	ClaimsMB    float64 `json:"claims_mb"`
	P50         float64 `json:"p50_ms"` // from commit to handler, since the last sample
	P99         float64 `json:"p99_ms"`
}

func (s SoakSample) rounded() SoakSample {
	s.Minute = *rounded(&s.Minute, 3)
	for _, v := range []*float64{&s.ResidentMB, &s.HeapMB, &s.OutboxMB, &s.KeysMB, &s.ClaimsMB, &s.P50, &s.P99} {
		*v = *rounded(v, 2)
	}
	return s
}

func (s SoakSample) String() string {
	return fmt.Sprintf("minute %.1f: %.0f MB, heap %.1f MB, %.0f goroutines, %.0f connections, %.0f dead tuples, outbox %.1f MB, keys %.1f MB, p50 %.1f ms, p99 %.1f ms",
		s.Minute, s.ResidentMB, s.HeapMB, s.Goroutines, s.Connections, s.DeadTuples, s.OutboxMB, s.KeysMB, s.P50, s.P99)
}

// SoakReport is the result of Soak.
type SoakReport struct {
	Flat bool `json:"flat"` // nothing that is judged grew
	SoakFound
	Rate     int           `json:"requests_per_second"`
	Minutes  float64       `json:"minutes"`
	Verdicts []SoakVerdict `json:"verdicts"`
	Samples  []SoakSample  `json:"samples"`

	Where
}

// WriteTable writes the report for people.
func (r *SoakReport) WriteTable(w io.Writer) error {
	t := newTable(w, "figure", "median of the first half", "rise in the second half")
	for _, v := range r.Verdicts {
		verdict := "flat"
		switch {
		case !v.Judged:
			verdict = "not judged: it grows until its day is over"
		case !v.Flat:
			verdict = "GROWS"
		}
		t.line("%s, %s\t%s\t%s, allowed %s: %s", v.What, v.Unit, number(v.Level), number(v.Rise), number(v.Allowed), verdict)
	}
	t.line("\t\t")
	t.line("%d orders, each handled once by each group; %d restarts, %d sessions ended\t\t", r.Orders, r.Restarts, r.Killed)
	r.writeNotes(t)
	return t.flush()
}

// Plots returns a plot for each figure.
func (r *SoakReport) Plots() (plots []*Plot) {
	for _, f := range soakFigures() {
		p := &Plot{Name: f.what, Title: f.what, Kind: kindTime, X: "minutes", Y: f.what + ", " + f.unit, Series: []Series{{Name: f.what}}}
		for _, s := range r.Samples {
			v := f.of(s)
			p.Series[0].Points = append(p.Series[0].Points, Point{X: s.Minute, Spread: Spread{v, v, v}})
		}
		plots = append(plots, p)
	}
	return plots
}

// SVG draws all figures over time.
func (r *SoakReport) SVG() []byte {
	return SVG(fmt.Sprintf("%s requests a second for %s minutes, with %d restarts", number(float64(r.Rate)), number(r.Minutes), r.Restarts), 2, r.Plots()...)
}
