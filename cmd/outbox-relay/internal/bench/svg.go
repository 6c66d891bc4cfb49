package bench

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Sizes of a panel and its margins, in pixels.
const (
	panelWidth, panelHeight                       = 760.0, 340.0
	marginLeft, marginRight, marginTop, marginEnd = 70.0, 20.0, 62.0, 52.0
	titleHeight                                   = 34.0
)

// style is readable on light and dark pages: the picture has no background of its own.
const style = `<style>
text { font: 12px system-ui, sans-serif; fill: #1f2328 } .title { font-size: 15px; font-weight: 600 } .quiet { fill: #59636e }
.grid { stroke: #8c959f; stroke-opacity: .35 } .axis { stroke: #8c959f } .spread { stroke: #59636e; stroke-width: 1.3; fill: none }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .quiet { fill: #9198a1 } .spread { stroke: #d1d7e0 } }
</style>`

// inks are the colors of the series, in this order. They have enough contrast to white and to
// black. Series that others are compared with are grey.
func inks() []string {
	return []string{"#2f81f7", "#2da44e", "#bf5af2", "#d4711b", "#e0457b", "#0e9aa7"}
}

const inkYardstick = "#848d97"

// SVG draws panels in columns below a title.
func SVG(title string, columns int, plots ...*Plot) []byte {
	rows := (len(plots) + columns - 1) / columns
	width, height := panelWidth*float64(columns), titleHeight+panelHeight*float64(rows)
	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%.0f" viewBox="0 0 %.0f %.0f" role="img">`+"\n%s\n", width, height, width, height, style)
	fmt.Fprintf(&out, "<title>%s</title>\n", escaped(title))
	text(&out, marginLeft, 22, "title", "start", title)
	for i, p := range plots {
		fmt.Fprintf(&out, `<g transform="translate(%.0f %.0f)">`+"\n", panelWidth*float64(i%columns), titleHeight+panelHeight*float64(i/columns))
		newPanel(p).draw(&out)
		out.WriteString("</g>\n")
	}
	out.WriteString("</svg>\n")
	return out.Bytes()
}

func escaped(s string) string {
	var out bytes.Buffer
	_ = xml.EscapeText(&out, []byte(s)) // a buffer takes everything
	return out.String()
}

func text(out *bytes.Buffer, x, y float64, class, anchor, s string) {
	fmt.Fprintf(out, `<text x="%.1f" y="%.1f" class="%s" text-anchor="%s">%s</text>`+"\n", x, y, class, anchor, escaped(s))
}

// panel is a plot with its scales.
type panel struct {
	*Plot

	places []string
	last   float64 // the largest number on the x axis
	step   float64 // between two lines of the grid
	top    float64
}

func newPanel(p *Plot) *panel {
	v := &panel{Plot: p}
	for _, s := range p.Series {
		for _, point := range s.Points {
			v.top, v.last = max(v.top, point.Max), max(v.last, point.X)
			if !slices.Contains(v.places, point.At) {
				v.places = append(v.places, point.At)
			}
		}
	}
	v.top, v.step = roundTop(v.top)
	return v
}

// roundTop returns the end of an axis from 0 and the distance of its lines.
func roundTop(highest float64) (top, step float64) {
	if highest <= 0 {
		return 1, 0.25
	}
	unit := math.Pow10(int(math.Floor(math.Log10(highest))))
	for _, step := range []float64{0.1, 0.2, 0.25, 0.5, 1, 2, 2.5} {
		if lines := math.Ceil(highest / unit / step * (1 - 1e-9)); lines <= 5 {
			return lines * step * unit, step * unit
		}
	}
	return 10 * unit, 2 * unit
}

func (v *panel) y(value float64) float64 {
	return panelHeight - marginEnd - value/v.top*(panelHeight-marginTop-marginEnd)
}

const plotWidth = panelWidth - marginLeft - marginRight

// slot is the width that a place has.
func (v *panel) slot() float64 { return plotWidth / float64(len(v.places)) }

// x of a point; bars of one place are side by side.
func (v *panel) x(series int, p Point) float64 {
	if v.Kind == kindTime {
		return marginLeft + p.X/max(v.last, 1e-9)*plotWidth
	}
	middle := marginLeft + (float64(slices.Index(v.places, p.At))+0.5)*v.slot()
	if v.Kind == kindBars {
		return middle + (float64(series)-float64(len(v.Series)-1)/2)*v.bar()
	}
	return middle + (float64(series)-float64(len(v.Series)-1)/2)*4 // spreads do not hide each other
}

func (v *panel) bar() float64 { return min(48, v.slot()*0.8/float64(len(v.Series))) }

func (v *panel) draw(out *bytes.Buffer) {
	for value := 0.0; value <= v.top*1.0001; value += v.step {
		class := "grid"
		if value == 0 {
			class = "axis"
		}
		fmt.Fprintf(out, `<line class="%s" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f"/>`+"\n", class, marginLeft, panelWidth-marginRight, v.y(value), v.y(value))
		text(out, marginLeft-8, v.y(value)+4, "quiet", "end", number(shown(value)))
	}
	text(out, marginLeft-60, marginTop-14, "quiet", "start", v.Y)
	text(out, marginLeft+plotWidth/2, panelHeight-12, "quiet", "middle", v.X)
	v.drawPlaces(out)
	yardsticks, legend := 0, marginLeft
	for i, s := range v.Series {
		ink := inks()[(i-yardsticks)%len(inks())]
		if s.Against == "" && len(v.Series) > 1 {
			ink, yardsticks = inkYardstick, yardsticks+1
		}
		v.drawSeries(out, i, s, ink)
		if len(v.Series) > 1 {
			fmt.Fprintf(out, `<rect x="%.1f" y="14" width="11" height="11" fill="%s"/>`+"\n", legend, ink)
			text(out, legend+16, 24, "", "start", s.Name)
			legend += 34 + 6.6*float64(len([]rune(s.Name)))
		}
	}
}

func (v *panel) drawPlaces(out *bytes.Buffer) {
	if v.Kind != kindTime {
		for i, place := range v.places {
			text(out, marginLeft+(float64(i)+0.5)*v.slot(), panelHeight-marginEnd+18, "", "middle", place)
		}
		return
	}
	end, step := roundTop(v.last)
	for value := 0.0; value <= min(end, v.last)*1.0001; value += step {
		text(out, v.x(0, Point{X: value}), panelHeight-marginEnd+18, "", "middle", number(shown(value)))
	}
}

func (v *panel) drawSeries(out *bytes.Buffer, i int, s Series, ink string) {
	var line strings.Builder
	for _, p := range s.Points {
		x, y := v.x(i, p), v.y(p.Median)
		fmt.Fprintf(&line, "%.1f,%.1f ", x, y)
		switch v.Kind {
		case kindBars:
			fmt.Fprintf(out, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"/>`+"\n", x-v.bar()*0.45, y, v.bar()*0.9, v.y(0)-y, ink)
		case kindLines:
			fmt.Fprintf(out, `<circle cx="%.1f" cy="%.1f" r="3.5" fill="%s"/>`+"\n", x, y, ink)
		}
		if p.Max > p.Min {
			fmt.Fprintf(out, `<path class="spread" d="M%.1f %.1fV%.1fM%.1f %.1fh6M%.1f %.1fh6"/>`+"\n", x, v.y(p.Min), v.y(p.Max), x-3, v.y(p.Min), x-3, v.y(p.Max))
		}
	}
	if v.Kind != kindBars {
		fmt.Fprintf(out, `<polyline points="%s" fill="none" stroke="%s" stroke-width="1.8"/>`+"\n", strings.TrimSpace(line.String()), ink)
	}
}

// number writes a number for people: 12,500 and 0.25.
func number(value float64) string {
	s := strconv.FormatFloat(value, 'f', -1, 64)
	whole, fraction, _ := strings.Cut(s, ".")
	for i := len(whole) - 3; i > 0 && whole[i-1] != '-'; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if fraction != "" {
		whole += "." + fraction
	}
	return whole
}
