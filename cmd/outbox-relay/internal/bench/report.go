package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// Report is the result of a benchmark.
type Report struct {
	Figures []Figure
	// Inputs are the sizes of the run, by the names of their options.
	Inputs map[string]int
	// Notes are the reasons why the figures mean little, if there are any.
	Notes []string
	// Postgres and Kafka describe the servers. Took includes their start.
	Postgres, Kafka string
	Took            time.Duration
}

// Figure is what the rounds measured of one thing.
type Figure struct {
	Key, Text, Unit string
	Digits          int // behind the decimal point
	Rounds          []float64
}

// Units of rates. Figures in the unit of the first one, the textbook's, are compared with it.
const (
	messageRate = "messages/s"
	rowRate     = "rows/s"
	requestRate = "requests/s"
)

// newReport takes the samples of the figures. One that could not be measured is left out.
func newReport(figures []Figure, s samples) *Report {
	r := &Report{}
	for _, f := range figures {
		if f.Rounds = s[f.Key]; len(f.Rounds) > 0 {
			r.Figures = append(r.Figures, f)
		}
	}
	return r
}

// sized adds the size of the run, and a note if it is too small for its figures to mean something.
func (r *Report) sized(what string, have, telling, rounds int) *Report {
	r.Inputs = map[string]int{what: have, "rounds": rounds}
	if have < telling {
		r.Notes = append(r.Notes, fmt.Sprintf("%d %s are too few: rates and ratios of such a run are noise; use --%s %d or more", have, what, what, telling))
	} else if rounds < RoundsDefault {
		r.Notes = append(r.Notes, fmt.Sprintf("--rounds %d is too few for medians: use %d or more", rounds, RoundsDefault))
	}
	return r
}

// Median of the rounds, without digits that mean nothing.
func (f Figure) Median() float64 { return f.rounded(percentile(f.Rounds, 0.5)) }

func (f Figure) number(value float64) string { return fmt.Sprintf("%.*f", f.Digits, value) }

func (f Figure) rounded(value float64) float64 {
	unit := math.Pow10(f.Digits)
	return math.Round(value*unit) / unit
}

// MarshalJSON makes one flat object: the median of each figure under its key, and with "_min" and
// "_max" its extremes.
func (r *Report) MarshalJSON() ([]byte, error) {
	object := map[string]any{"postgres": r.Postgres, "kafka": r.Kafka, "seconds": math.Round(r.Took.Seconds()*10) / 10}
	for key, value := range r.Inputs {
		object[key] = value
	}
	for _, f := range r.Figures {
		object[f.Key] = f.Median()
		object[f.Key+"_min"], object[f.Key+"_max"] = f.rounded(slices.Min(f.Rounds)), f.rounded(slices.Max(f.Rounds))
	}
	if len(r.Notes) > 0 {
		object["notes"] = r.Notes
	}
	return json.Marshal(object)
}

// WriteTable writes the report for people: medians, extremes, and for rates the ratio to the
// textbook.
func (r *Report) WriteTable(w io.Writer) error {
	var text strings.Builder
	t := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "\tmedian\tmin..max\tunit\tagainst the textbook") // a strings.Builder never fails
	for _, f := range r.Figures {
		against := ""
		if textbook := r.Figures[0]; f.Unit == textbook.Unit {
			against = fmt.Sprintf("%.2fx", f.Median()/textbook.Median())
		}
		_, _ = fmt.Fprintf(t, "%s (%s)\t%s\t%s..%s\t%s\t%s\n", f.Key, f.Text, f.number(f.Median()),
			f.number(slices.Min(f.Rounds)), f.number(slices.Max(f.Rounds)), f.Unit, against)
	}
	_ = t.Flush()
	for _, note := range r.Notes {
		text.WriteString("note: " + note + "\n")
	}
	return terminal.Write(w, text.String())
}

// meter measures the rate between the first commit of a run and its last. The messages of the first
// commit do not count, because their duration is unknown: it includes connecting, joining the group
// and preparing statements.
type meter struct {
	want int

	mu          sync.Mutex
	first, last time.Time
	skipped     int
	done        int
}

// add counts messages that were just committed and reports whether all are done.
func (m *meter) add(n int) bool {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.done == 0 {
		m.first, m.skipped = now, n
	}
	m.done, m.last = m.done+n, now
	return m.done >= m.want
}

var errTooFew = errors.New("everything was handled in one transaction: nothing to measure, take more messages")

// rate in messages a second.
func (m *meter) rate() (float64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	elapsed := m.last.Sub(m.first)
	if m.done == m.skipped || elapsed <= 0 {
		return 0, errTooFew
	}
	return float64(m.done-m.skipped) / elapsed.Seconds(), nil
}

// samples are the figures of the rounds, by key.
type samples map[string][]float64

func (s samples) add(key string, value float64) { s[key] = append(s[key], value) }

// percentile returns the value below which a share of the values is, and between two values their
// mean.
func percentile(values []float64, share float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	place := share * float64(len(sorted)-1)
	below := int(place)
	if below+1 >= len(sorted) {
		return sorted[len(sorted)-1]
	}
	return sorted[below] + (place-float64(below))*(sorted[below+1]-sorted[below])
}
