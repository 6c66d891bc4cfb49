package torture

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"github.com/effectonce/effectonce/consumer"
)

// loss is what may be missing behind a promotion that lost commits.
type loss struct {
	// orders with numbers above the first, up to the second.
	ordersFrom, ordersTo int64
	// requests with numbers up to this, unless they were among the first to be answered.
	requestsTo    int64
	answeredFirst int
}

// lostCommits ends PostgreSQL, and continues with a copy that is older, as where a standby that lagged is promoted.
func lostCommits(ctx context.Context, r *run, f Fault) {
	// By position, what is published again is another message; and so it is without an order, if a copy of the parent is first. Dead letters stay.
	repeats := func(g GroupPlan) bool {
		return g.config.Dedup == consumer.DedupByPosition || g.config.DeadLetterTopic != "" || g.child != "" && !g.ordered()
	}
	if r.plan.Retention || slices.ContainsFunc(r.plan.Groups, repeats) {
		r.report.Faults--
		return
	}
	older, l := r.data+".older", loss{}
	r.crash(ctx, crash{server: &r.postgres.Server, meanwhile: func() error {
		r.mu.Lock()
		l.ordersFrom, l.answeredFirst = r.orders.Load(), len(r.answered)
		r.mu.Unlock()
		if output, err := exec.CommandContext(ctx, "cp", "-a", r.data, older).CombinedOutput(); err != nil { //nolint:gosec // with its owner
			return fmt.Errorf("copy: %w: %s", err, output)
		}
		return nil
	}}, crash{server: &r.postgres.Server, before: f.Lasts / 2, behind: f.Lasts / 10, meanwhile: func() error {
		if _, err := os.Stat(filepath.Join(older, "standby.signal")); err == nil {
			return os.RemoveAll(older) // both would be promoted to one timeline
		}
		r.mu.Lock()
		l.ordersTo, l.requestsTo = r.orders.Load(), r.requests.Load()
		r.losses = append(r.losses, l)
		for _, g := range r.groups {
			r.rewound[g.name] += 2 // the order of a rewind may come back, too
		}
		r.mu.Unlock()
		r.logger.Info("nemesis: commits are lost", "loss", fmt.Sprintf("%+v", l))
		err := os.RemoveAll(r.data)
		if err == nil {
			err = os.Rename(older, r.data)
		}
		if err == nil {
			err = r.standBy(ctx, f)
		}
		return err
	}})
}

// orderMayBeLost reports whether a promotion may have lost an order.
func (r *run) orderMayBeLost(id int64) bool {
	return slices.ContainsFunc(r.losses, func(l loss) bool { return l.ordersFrom < id && id <= l.ordersTo })
}

// requestMayBeLost reports whether a promotion may have lost a request, so that it happened again, or not at all.
// nth is how many requests were answered before.
func (r *run) requestMayBeLost(number int64, nth int) bool {
	return slices.ContainsFunc(r.losses, func(l loss) bool { return max(number, -number) <= l.requestsTo && nth >= l.answeredFirst })
}
