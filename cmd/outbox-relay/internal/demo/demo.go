package demo

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/demo/checker"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/site"
)

// Report is the result of a run.
type Report struct {
	checker.Verdict
	Injected int      `json:"duplicates_injected"` // records that the demo published again
	Kills    int      `json:"kills"`               // with SIGKILL
	Freezes  int      `json:"freezes"`
	Crashes  int      `json:"crashes"` // processes that ended without being told to; there should be none
	Seed     uint64   `json:"seed"`
	Notes    []string `json:"-"` // other problems, and where the logs are
}

// Run runs the pipeline and returns what the checker found. An error means that the run could not
// be carried out or judged. A broken promise is not an error, but part of the Report. Run leaves
// nothing behind except the logs of a failed run, and what the error names.
func Run(ctx context.Context, options Options) (Report, error) {
	if err := errors.Join(options.Check(), supported()); err != nil {
		return Report{}, err
	}
	j := newJob(options)
	logs, err := os.MkdirTemp("", "effectonce-demo-")
	if err != nil {
		return Report{}, fmt.Errorf("create a directory for the processes' logs: %w", err)
	}
	report, err := prepareAndCarryOut(ctx, options, j, logs)
	report.Seed = options.Seed
	failed := err != nil || !report.Held() && !options.WithoutDedup
	switch {
	case ctx.Err() != nil || !failed:
		err = errors.Join(err, os.RemoveAll(logs))
	case err != nil:
		err = fmt.Errorf("%w\nthe processes' logs are in %s", err, logs)
	default:
		report.Notes = append(report.Notes, "the processes' logs are in "+logs)
	}
	return report, err
}

// newJob names everything of the run after one random number, so that runs do not conflict with
// each other, nor with an existing schema.
func newJob(options Options) job {
	name := site.Name("effectonce_demo_")
	return job{
		DatabaseURL: options.DatabaseURL, Brokers: options.Brokers,
		Schema: name, Topic: name, Group: name,
		Orders: options.Orders, Seed: options.Seed, Duration: options.Duration,
		Session: options.Session, WithoutDedup: options.WithoutDedup,
	}
}
