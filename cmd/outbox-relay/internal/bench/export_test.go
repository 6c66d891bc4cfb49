package bench

import (
	"context"
	"errors"
)

// Percentile is percentile.
func Percentile(values []float64, share float64) float64 { return percentile(values, share) }

// Rate returns the rate of a meter that saw these commits.
func Rate(want int, commits ...int) (rate float64, done bool, err error) {
	m := &meter{want: want}
	for _, n := range commits {
		done = m.add(n)
	}
	rate, err = m.rate()
	return rate, done, err
}

// Judge returns the verdict on a run of n messages that left the effects of a statement.
func Judge(ctx context.Context, opts Options, n int, effects string) (err error) {
	s, err := newSite(ctx, opts)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.remove(ctx)) }()
	return errors.Join(
		s.exec(ctx, "create tables", tablesSQL),
		s.exec(ctx, "make effects", effects),
		s.judge(ctx, "by_id", n),
	)
}
