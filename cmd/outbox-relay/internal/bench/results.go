package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
)

// Results are the figures of one run, in plots. The documents' plots are drawn from a file of them.
type Results struct {
	Command string  `json:"command,omitempty"` // that measured them
	Machine string  `json:"machine,omitempty"`
	Rounds  int     `json:"rounds"`
	Short   bool    `json:"short,omitempty"` // sizes at which only large differences mean something
	Plots   []*Plot `json:"plots"`

	Where
}

// Kinds of plots.
const (
	kindBars  = ""      // places are named and compared
	kindLines = "lines" // places are named and grow from left to right
	kindTime  = "time"  // places are numbers
)

// Plot is a picture: several ways to do the same, each at the same places.
type Plot struct {
	Name         string   `json:"name"` // of its file, without .svg
	Title        string   `json:"title"`
	Kind         string   `json:"kind,omitempty"`
	X            string   `json:"x,omitempty"` // titles of the axes, with units
	Y            string   `json:"y"`
	LessIsBetter bool     `json:"less_is_better,omitempty"`
	Series       []Series `json:"series"`
}

// Series is one way.
type Series struct {
	Name string `json:"name"`
	// Against is the series of the plot that this one is compared with; empty: it is a yardstick.
	Against string  `json:"against,omitempty"`
	Points  []Point `json:"points"`
}

// Point is a figure: the median of its rounds, and their spread.
type Point struct {
	At string  `json:"at,omitempty"` // the name of the place …
	X  float64 `json:"x,omitempty"`  // … or its number
	Spread
	// Ratio to the other series at the same place. It is made of the ratios of each round: what
	// slows a round down slows both.
	Ratio *Spread `json:"ratio,omitempty"`
}

// Spread is a median with the smallest and the largest value.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

func spreadOf(values []float64) Spread {
	return Spread{shown(percentile(values, 0.5)), shown(slices.Min(values)), shown(slices.Max(values))}
}

// shown keeps three digits that mean something.
func shown(value float64) float64 {
	if value == 0 {
		return 0
	}
	unit := math.Pow10(2 - int(math.Floor(math.Log10(math.Abs(value)))))
	return math.Round(value*unit) / unit
}

// add adds the samples of a place to the series of that name. Rounds are compared one by one with
// those of against.
func (p *Plot) add(name, at string, values []float64, against string, theirs []float64) {
	if len(values) == 0 {
		return // not measured here
	}
	i := slices.IndexFunc(p.Series, func(s Series) bool { return s.Name == name })
	if i < 0 {
		i, p.Series = len(p.Series), append(p.Series, Series{Name: name, Against: against})
	}
	point := Point{At: at, Spread: spreadOf(values)}
	if against != "" && len(theirs) == len(values) {
		ratios := make([]float64, 0, len(values))
		for round := range values {
			if theirs[round] != 0 {
				ratios = append(ratios, values[round]/theirs[round])
			}
		}
		if len(ratios) > 0 {
			all := spreadOf(ratios)
			point.Ratio = &all
		}
	}
	p.Series[i].Points = append(p.Series[i].Points, point)
}

// WriteTable writes the results for people.
func (r *Results) WriteTable(w io.Writer) error {
	t := newTable(w, "figure", "median (smallest to largest)", "against the other way")
	for _, p := range r.Plots {
		t.line("\t\t")
		t.line("%s: %s\t\t", p.Title, p.Y)
		for _, s := range p.Series {
			for _, point := range s.Points {
				ratio := ""
				if point.Ratio != nil {
					ratio = fmt.Sprintf("%s of %s", point.Ratio, s.Against)
				}
				t.line("%s, %s\t%s\t%s", point.At, s.Name, point.Spread, ratio)
			}
		}
	}
	r.writeNotes(t)
	return t.flush()
}

func (s Spread) String() string {
	return fmt.Sprintf("%s (%s to %s)", number(s.Median), number(s.Min), number(s.Max))
}

// LoadResults reads a file that Save wrote.
func LoadResults(path string) (*Results, error) {
	text, err := os.ReadFile(path) //nolint:gosec // the user names the file
	if err != nil {
		return nil, err
	}
	r := &Results{}
	if err := json.Unmarshal(text, r); err != nil {
		return nil, fmt.Errorf("%s: no results of a benchmark: %w", path, err)
	}
	if len(r.Plots) == 0 {
		return nil, fmt.Errorf("%s: no results of a benchmark", path)
	}
	return r, nil
}

// Merge replaces the plots that newer has, and adds those that are new.
func (r *Results) Merge(newer *Results) {
	for _, p := range newer.Plots {
		if i := slices.IndexFunc(r.Plots, func(old *Plot) bool { return old.Name == p.Name }); i >= 0 {
			r.Plots[i] = p
		} else {
			r.Plots = append(r.Plots, p)
		}
	}
}

// Save writes results, or another report, to a file.
func Save(path string, report any) error {
	text, err := json.MarshalIndent(report, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644) //nolint:gosec // figures are no secret
}

// Draw writes a file for each plot into a directory.
func (r *Results) Draw(dir string) error {
	var problems []error
	for _, p := range r.Plots {
		problems = append(problems, os.WriteFile(filepath.Join(dir, p.Name+".svg"), SVG(p.Title, 1, p), 0o644)) //nolint:gosec // figures are no secret
	}
	return errors.Join(problems...)
}
