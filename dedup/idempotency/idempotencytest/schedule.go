package idempotencytest

import (
	"context"
	"errors"
	"fmt"

	"github.com/effectonce/effectonce/internal/crashpoint"
)

// schedule is one way in which the request reaches the replicas.
type schedule struct {
	name string
	send func(ctx context.Context, r *run) error
	hint string // the likely mistake in the work if effects differ
}

const (
	hintRandom  = "the work's effects differ from run to run: derive IDs from Key.ChildID, take times from the request or the database's defaults, or name the columns in Options.Ignore"
	hintAgain   = "the request was executed twice: does it go through Once or Flow.Do, under the same key each time?"
	hintOutside = "the work seems to write through another connection than its tx, to call a foreign system without Step.ChildID as its key, or to keep in memory what it did: only what goes through tx is committed with the key, and only a call under ChildID can be repeated"
)

// atOnce is how many clients send the request concurrently.
const atOnce = 10

// schedules lists the schedules after the clean run, which passed these points.
func schedules(passed []string) []schedule {
	all := []schedule{
		{"a second clean run", func(ctx context.Context, r *run) error { return r.settle(ctx) }, hintRandom},
		{"the request three times in a row, the third to another replica", func(ctx context.Context, r *run) error {
			return errors.Join(r.settle(ctx), r.settle(ctx), r.restart())
		}, hintAgain},
		{fmt.Sprintf("the request %d times at once", atOnce), func(ctx context.Context, r *run) error { return r.together(ctx, atOnce) }, hintAgain},
	}
	passes := map[string]int{}
	for _, point := range passed {
		pass := passes[point]
		passes[point]++
		where := fmt.Sprintf("%s (pass %d)", texts()[point], pass+1)
		all = append(all, schedule{
			"the replica is killed " + where,
			func(ctx context.Context, r *run) error { return r.killed(ctx, point, pass) }, hintOutside,
		})
	}
	return all
}

func texts() map[string]string {
	return map[string]string{
		crashpoint.KeyClaimed:    "after the claim, before the work",
		crashpoint.KeyCalling:    "before a foreign call",
		crashpoint.KeyCalled:     "after a foreign call, before its result is stored",
		crashpoint.KeyWorked:     "after the work, before COMMIT",
		crashpoint.KeyCommitting: "right before COMMIT",
		crashpoint.KeyCommitted:  "right after COMMIT",
		crashpoint.KeyAdvanced:   "after a phase, before the next",
	}
}
