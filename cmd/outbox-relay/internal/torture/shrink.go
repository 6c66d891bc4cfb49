package torture

import (
	"context"
	"fmt"
	"slices"
)

// shrink cuts faults from a plan that broke the promise, as long as it breaks it without them: the
// halves, then quarters and so on (delta debugging, Zeller and Hildebrandt 2002). A cut counts if the
// failure recurs in one of ShrinkTries runs: the interleaving differs each time. It returns the
// shortest plan found.
func (t *run) shrink(ctx context.Context, a *arena, p Plan) (Plan, error) {
	for pieces := 2; len(p.Faults) > 1; {
		size := (len(p.Faults) + pieces - 1) / pieces
		shorter := false
		for from := 0; from < len(p.Faults); from += size {
			cut := p
			cut.Faults = slices.Delete(slices.Clone(p.Faults), from, min(from+size, len(p.Faults)))
			broken, err := t.breaks(ctx, a, cut)
			if err != nil {
				return p, err
			}
			if broken {
				p, shorter = cut, true
				break
			}
		}
		switch {
		case shorter:
			pieces = max(2, pieces-1)
		case size == 1:
			return p, nil
		default:
			pieces = min(2*pieces, len(p.Faults))
		}
	}
	return p, nil
}

// breaks reports whether a plan breaks the promise in one of a few runs.
func (t *run) breaks(ctx context.Context, a *arena, p Plan) (bool, error) {
	for range t.ShrinkTries {
		result, err := t.play(ctx, a, p)
		if err != nil {
			return false, fmt.Errorf("shrink, with %d faults: %w", len(p.Faults), err)
		}
		if !result.Verdict.Held() {
			return true, nil
		}
	}
	return false, nil
}
