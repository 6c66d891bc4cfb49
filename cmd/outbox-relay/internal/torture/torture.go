package torture

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/fleet"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/judge"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
)

// Bounds and defaults of Options.
const (
	MinutesMin     = 0
	MinutesDefault = 5
	MinutesMax     = 7 * 24 * 60
	SecondsMin     = 5
	SecondsDefault = 40
	SecondsMax     = 600
	RateMin        = 50
	RateDefault    = 10_000
	RateMax        = 100_000
	PaceMin        = 0
	PaceDefault    = 120
	PaceMax        = 1200
	BrokersMin     = 1
	BrokersDefault = 1
	BrokersMax     = 5
	RoundsMax      = 1_000_000
)

// Options are the options of Run.
type Options struct {
	Command  []string      // starts a child, which calls worker.Run
	Program  []string      // the command line, for the operator
	Duration time.Duration // no round begins after it
	Seed     uint64
	Seconds  int           // of faults in each round
	Rate     int           // orders per second at most
	Pace     float64       // faults per second on average
	Bulk     bool          // see Plan.Bulk
	Embedded bool          // no containers
	Brokers  int           // of Kafka
	Offset   time.Duration // of the database's clock; not 0: no container
	Other    string        // program of another release, for every second relay; empty: none
	Standby  bool          // no containers: each round has a standby, and promotions lose commits
	State    string        // file with the rounds that are done; empty: none
	Rounds   int           // no round begins after this many; 0: Duration alone decides
	// RivalProgram is built from package rivals; empty: only the rivals that this program has.
	RivalProgram string
	Plan         string // file with the plan of the one round to play; empty: draw
	Dir          string // for logs of rounds that failed; empty: the system's
	Out          io.Writer
	First        bool // stop at the first round that fails
	// ShrinkTries is how often a shortened plan of the first round that fails is played before it
	// counts as harmless. 0: do not shrink.
	ShrinkTries int
}

// Report is the result of a run, with that of the runs that it resumed.
type Report struct {
	Environment string `json:"environment"`
	Seed        uint64 `json:"seed"`
	Rounds      int    `json:"rounds"`
	Failed      int    `json:"failed"` // rounds
	Faults      int    `json:"faults"`
	judge.Verdict

	Kinds   map[string]int `json:"kinds"` // faults by kind
	Seconds float64        `json:"seconds"`
	// PerMessage and PerFault bound the rate of broken promises at 95 % confidence if there was
	// none: three by the number of tries.
	PerMessage float64  `json:"bound_per_message,omitempty"`
	PerFault   float64  `json:"bound_per_fault,omitempty"`
	Logs       []string `json:"logs,omitempty"`
}

type run struct {
	Options

	rivals map[string]scene.Description // those of RivalProgram
}

// Run plays rounds until the time is over. An error means that a round could not be played or
// judged.
func Run(ctx context.Context, options Options) (Report, error) {
	if err := fleet.Supported(); err != nil {
		return Report{}, err
	}
	t := &run{Options: options, rivals: map[string]scene.Description{}}
	if options.RivalProgram != "" { // a plan may be a rival's
		if _, err := t.describe(ctx); err != nil {
			return Report{}, err
		}
	}
	a, err := openArena(ctx, options.Embedded || options.Standby, options.Offset, max(1, options.Brokers))
	if err != nil {
		return Report{}, err
	}
	a.standbys = options.Standby
	report := Report{Environment: a.environment(), Seed: options.Seed}
	if t.Other != "" {
		report.Environment += ", every second relay of another release"
	}
	if t.Bulk {
		report.Environment += ", bulk"
	}
	err = t.rounds(ctx, a, &report)
	return report, errors.Join(err, a.close(ctx))
}

func (t *run) rounds(ctx context.Context, a *arena, report *Report) error {
	begun := time.Now()
	first, err := t.resume(report)
	if err != nil {
		return err
	}
	if t.Plan != "" {
		var p Plan
		text, err := os.ReadFile(t.Plan)
		if err == nil {
			err = json.Unmarshal(text, &p)
		}
		if err != nil {
			return fmt.Errorf("plan %s: %w", t.Plan, err)
		}
		result, err := t.play(ctx, a, p)
		if err != nil {
			return fmt.Errorf("the plan, whose logs are in %s: %w", result.Logs, err)
		}
		report.AddRound(result)
		return t.minimise(ctx, a, p, result)
	}
	for n := first; n == first || t.more(n-first, begun); n++ {
		p := Draw(t.Seed, n, t.Seconds, t.Rate, t.Pace, a.abilities())
		if t.Bulk {
			p = p.Bulk(t.Rate)
		}
		result, err := t.play(ctx, a, p)
		if err != nil {
			return fmt.Errorf("round %d, whose logs are in %s: %w", n, result.Logs, err)
		}
		report.AddRound(result)
		if err := t.remember(report.Environment, result); err != nil {
			return err
		}
		if report.Failed > 0 && (t.First || t.ShrinkTries > 0) {
			return t.minimise(ctx, a, p, result)
		}
	}
	return nil
}

// more reports whether another round may begin.
func (t *run) more(played int, begun time.Time) bool {
	if t.Rounds > 0 && played >= t.Rounds {
		return false
	}
	return t.Rounds > 0 || time.Since(begun) < t.Duration
}

// minimise leaves the shortest plan that still fails beside the logs of a round that failed.
func (t *run) minimise(ctx context.Context, a *arena, p Plan, result Result) error {
	if t.ShrinkTries == 0 || result.Verdict.Held() {
		return nil
	}
	short, err := t.shrink(ctx, a, p)
	if err != nil {
		return err
	}
	text, err := json.MarshalIndent(short, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(result.Logs, "short.json"), text, 0o600)
}

// AddRound adds a round to the totals.
func (r *Report) AddRound(result Result) {
	r.Rounds++
	r.Add(result.Verdict)
	if r.Kinds == nil {
		r.Kinds = map[string]int{}
	}
	for kind, n := range result.Faults {
		r.Kinds[kind] += n
		r.Faults += n
	}
	r.Seconds += result.Seconds
	if !result.Verdict.Held() {
		r.Failed++
		r.Logs = append(r.Logs, result.Logs)
	}
	if r.Failed == 0 {
		r.PerMessage, r.PerFault = 3/float64(max(1, r.Messages)), 3/float64(max(1, r.Faults))
	}
}

// done is a line of the state.
type done struct {
	Environment string `json:"environment"`
	Seed        uint64 `json:"seed"`
	Result
}

// remember adds a round to the state.
func (t *run) remember(environment string, result Result) (err error) {
	if t.State == "" {
		return nil
	}
	line, err := json.Marshal(done{environment, t.Seed, result})
	if err != nil {
		return err
	}
	file, err := os.OpenFile(t.State, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	_, err = file.Write(append(line, '\n'))
	return err
}

// resume adds the rounds of the state that were played in this environment, and returns the number
// of the next round of the seed.
func (t *run) resume(report *Report) (next int, err error) {
	next = 1
	if t.State == "" {
		return next, nil
	}
	file, err := os.Open(t.State)
	if errors.Is(err, os.ErrNotExist) {
		return next, nil
	}
	if err != nil {
		return next, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var d done
		if err := json.Unmarshal(lines.Bytes(), &d); err != nil {
			return next, fmt.Errorf("state %s: %w", t.State, err)
		}
		if d.Environment == report.Environment {
			report.AddRound(d.Result)
		}
		if d.Seed == t.Seed {
			next = max(next, d.Round+1)
		}
	}
	return next, lines.Err()
}
