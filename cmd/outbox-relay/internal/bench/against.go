package bench

import (
	"fmt"
	"slices"
)

// Fell returns what fell against earlier results, and how many ratios were compared. Only ratios
// are compared, which depend on the machine much less than figures. A ratio fell if all of its
// rounds are worse than all earlier rounds, and its median by more than a tenth.
func (r *Results) Fell(earlier *Results) (fell []string, compared int) {
	for _, p := range r.Plots {
		for _, s := range p.Series {
			for _, point := range s.Points {
				before := earlier.ratio(p.Name, s.Name, point.At)
				if point.Ratio == nil || before == nil {
					continue
				}
				compared++
				now, then := *point.Ratio, *before
				worse := now.Max < then.Min && now.Median < 0.9*then.Median
				if p.LessIsBetter {
					worse = now.Min > then.Max && now.Median > 1.1*then.Median
				}
				if worse {
					fell = append(fell, fmt.Sprintf("%s, %s, %s: %s of %s, was %s", p.Name, point.At, s.Name, now, s.Against, then))
				}
			}
		}
	}
	return fell, compared
}

func (r *Results) ratio(plot, series, at string) *Spread {
	for _, p := range r.Plots {
		for _, s := range p.Series {
			if i := slices.IndexFunc(s.Points, func(point Point) bool { return point.At == at }); p.Name == plot && s.Name == series && i >= 0 {
				return s.Points[i].Ratio
			}
		}
	}
	return nil
}
