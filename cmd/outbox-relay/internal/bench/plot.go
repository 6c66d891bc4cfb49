package bench

import (
	_ "embed"
	"html/template"
	"io"
	"math"
	"slices"
)

//go:embed plot.svg
var plotSVG string

// Sizes of a plot, in pixels.
const (
	plotRow  = 22
	plotBar  = 300 // of the largest value of a unit
	plotHead = 44
)

// plotLine is a line of a plot: a heading, or the bar of a figure with the range of its rounds.
type plotLine struct {
	Y                          int
	Heading, Name, Value, Hint string
	Median, Low, High          float64 // in pixels
}

// WritePlot writes the report as an SVG picture: a bar for each median, in groups of one unit, with
// a line from the lowest round to the highest.
func (r *Report) WritePlot(w io.Writer) error {
	picture, err := template.New("plot").Parse(plotSVG)
	if err != nil {
		return err
	}
	var lines []plotLine
	y := plotHead
	add := func(l plotLine) {
		l.Y = y
		lines = append(lines, l)
		y += plotRow
	}
	for i, f := range r.Figures {
		if i == 0 || f.Unit != r.Figures[i-1].Unit {
			add(plotLine{Heading: f.Unit})
		}
		largest := math.SmallestNonzeroFloat64 // a figure may be 0
		for _, other := range r.Figures {
			if other.Unit == f.Unit {
				largest = max(largest, slices.Max(other.Rounds))
			}
		}
		scaled := func(value float64) float64 { return value / largest * plotBar }
		low, high := slices.Min(f.Rounds), slices.Max(f.Rounds)
		add(plotLine{
			Name: f.Key, Value: f.number(f.Median()), Hint: f.Text + ", " + f.number(low) + " to " + f.number(high),
			Median: scaled(f.Median()), Low: scaled(low), High: scaled(high),
		})
	}
	return picture.Execute(w, map[string]any{"Lines": lines, "Height": y + plotRow, "Report": r})
}
