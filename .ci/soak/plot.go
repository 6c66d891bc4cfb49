package main

import (
	"fmt"
	"slices"
	"strings"
)

const (
	wide, high, left, gap = 640, 60, 20, 30
)

// svg draws a line for each series, from 0 to its largest value.
func (s *soak) svg() string {
	var b strings.Builder
	names := series()
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n", wide+2*left, len(names)*(high+gap)+gap)
	b.WriteString(`<rect width="100%" height="100%" fill="white"/>` + "\n")
	last := s.samples[len(s.samples)-1][0]
	for i, name := range names {
		top := i*(high+gap) + gap
		var values []float64
		for _, sample := range s.samples {
			values = append(values, sample[i+1])
		}
		largest := max(slices.Max(values), 1)
		fmt.Fprintf(&b, `<text x="%d" y="%d">%s: %.4g to %.4g, at the end %.4g</text>`+"\n", left, top-4, name, slices.Min(values), largest, values[len(values)-1])
		fmt.Fprintf(&b, `<rect x="%d" y="%d" width="%d" height="%d" fill="#f4f4f4"/><polyline fill="none" stroke="#1f77b4" points="`, left, top, wide, high)
		for j, value := range values {
			fmt.Fprintf(&b, "%.1f,%.1f ", left+s.samples[j][0]/last*wide, float64(top)+high*(1-value/largest))
		}
		b.WriteString(`"/>` + "\n")
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d">%.0f minutes</text>`+"\n</svg>\n", left, len(names)*(high+gap)+gap-8, last)
	return b.String()
}
