package torture

import (
	"context"
	"maps"
	"slices"
	"strings"
)

// shrink repeats a run that failed, each time with fewer kinds of faults and habits, and returns those that are
// left. Chance has a part in each run, so they may be too many. The rest of the plan is the same. Source: delta
// debugging, Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002.
func shrink(ctx context.Context, opts Options) (left []string, err error) {
	var all []string
	for _, f := range faults() {
		all = append(all, f.name)
	}
	all = append(all, slices.Sorted(maps.Keys(habits()))...)
	fails := func(left []string) (bool, error) {
		opts.Without = slices.DeleteFunc(slices.Clone(all), func(kind string) bool { return slices.Contains(left, kind) })
		opts.Progress("again, with " + strings.Join(left, ", "))
		for range opts.Shrink {
			if report, err := once(ctx, opts); err != nil || !report.Held() {
				return true, err
			}
		}
		return false, nil
	}
	left = all
	for size := (len(all) + 1) / 2; size > 0 && len(left) > 0; size /= 2 {
		for from := 0; from < len(left); {
			rest := slices.Delete(slices.Clone(left), from, min(from+size, len(left)))
			failed, err := fails(rest)
			if err != nil {
				return left, err
			}
			if failed {
				left = rest
			} else {
				from += size
			}
		}
	}
	return left, nil
}
