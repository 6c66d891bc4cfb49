package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

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
	logs, err := os.MkdirTemp("", "effectonce-demo-")
	if err != nil {
		return Report{}, fmt.Errorf("create a directory for the processes' logs: %w", err)
	}
	// The name is random, so that runs do not conflict with each other, nor with an existing schema.
	report, err := prepareAndCarryOut(ctx, job{Options: options, Run: site.Name("effectonce_demo_")}, logs)
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

// Bounds and defaults of Options.
const (
	OrdersMin       = 50
	OrdersDefault   = 3000
	OrdersMax       = 100_000
	DurationMin     = 5 * time.Second
	DurationDefault = 20 * time.Second
	DurationMax     = 10 * time.Minute
	SessionDefault  = 6 * time.Second // the least that brokers accept unless configured
	// OrdersPerSecondMax is the rate that the shop achieves beside everything else on two cores.
	OrdersPerSecondMax = 500
)

// Options are the options of Run.
type Options struct {
	// Command starts a child: program and arguments. It has to call RunProcess.
	Command []string `json:"-"`
	// DatabaseURL is the URL of the PostgreSQL database. Children receive it through a pipe, never
	// as an argument or in their environment, where other users of the machine could read its
	// password.
	DatabaseURL string
	// Brokers are the seed brokers of the Kafka cluster.
	Brokers []string
	// Orders is how many orders the shop places, at most OrdersPerSecondMax for each second of
	// Duration.
	Orders int
	// Duration is how long the shop takes for them, and how long processes are killed and frozen.
	Duration time.Duration
	// Session is Kafka's session timeout for the consumers: how long the group waits for a member
	// that was killed or is frozen.
	Session time.Duration
	// Seed determines which orders are placed, and what is killed, frozen and duplicated when. The
	// effect on the processes depends on the machine, so two runs of one seed are similar, not
	// identical.
	Seed uint64
	// WithoutDedup removes the claim from the consumers, to show that the checker detects the
	// difference.
	WithoutDedup bool
	// Progress is called a few times a second, from one goroutine.
	Progress func(Progress) `json:"-"`
}

// Progress is the progress of a run.
type Progress struct {
	Elapsed    time.Duration
	Phase      string // the current phase
	Orders     int    // orders that the shop has committed
	Delivered  int    // different messages in the topic
	Effects    int    // orders that have an effect
	Duplicates int    // records that were published again on purpose
	Kills      int
	Freezes    int
}

// Check returns what is wrong with the numbers together; the flags have their bounds.
func (o Options) Check() error {
	if rate := float64(o.Orders) / o.Duration.Seconds(); rate > OrdersPerSecondMax {
		return fmt.Errorf("%d orders in %v are %.0f a second: want at most %d: use a longer duration or fewer orders", o.Orders, o.Duration, rate, OrdersPerSecondMax)
	}
	return nil
}
