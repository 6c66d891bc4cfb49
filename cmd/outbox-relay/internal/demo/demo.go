package demo

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/demo/checker"
)

// Report is the result of a run.
type Report struct {
	checker.Verdict
	Injected int // records that the demo published again
	Kills    int // with SIGKILL
	Freezes  int
	Crashes  int // processes that ended without being told to; there should be none
	Seed     uint64
	Elapsed  time.Duration
	Notes    []string // other problems, and where the logs are
}

// Run runs the pipeline and returns what the checker found. An error means that the run could not
// be carried out or judged. A broken promise is not an error, but part of the Report. Run leaves
// nothing behind except the logs of a failed run, and what the error names.
func Run(ctx context.Context, options Options) (Report, error) {
	options, err := options.withDefaults()
	if err = errors.Join(err, supported()); err != nil {
		return Report{}, err
	}
	begin := time.Now()
	j := newJob(options)
	logs, err := os.MkdirTemp("", "effectonce-demo-")
	if err != nil {
		return Report{}, fmt.Errorf("create a directory for the processes' logs: %w", err)
	}
	var m made
	report, err := prepareAndCarryOut(ctx, options, j, &m, logs)
	err = errors.Join(err, tearDown(ctx, j, m))
	report.Seed, report.Elapsed = options.Seed, time.Since(begin)
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
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails: crypto/rand documents it
	name := "effectonce_demo_" + hex.EncodeToString(random[:])
	return job{
		DatabaseURL: options.DatabaseURL, Brokers: options.Brokers,
		Schema: name, Topic: name, Group: name,
		Orders: options.Orders, Seed: options.Seed, Duration: options.Duration,
		Session: options.Session, WithoutDedup: options.WithoutDedup,
	}
}
