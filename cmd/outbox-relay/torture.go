//go:build !lean

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/worker"
)

// flagTortureProcess makes the program a child of the torture run.
const flagTortureProcess = "torture-process"

func newTorture(s *cli.Settings) *cobra.Command {
	t := &torturer{Settings: s}
	var child bool
	cmd := cli.Offline(&cobra.Command{
		Use:   "torture",
		Short: "Run random configurations under random faults for long, and let an independent judge check them",
		Long: `Run random configurations under random faults for long, and let an independent judge check them.

Each round draws a configuration from the seed: producers, relays in both modes, consumer groups of every shape, order,
dedup level and failure policy, requests with idempotency keys. While they work, processes are killed, frozen and
restarted with other settings, sessions ended, servers crashed, connections cut, slowed and silenced, transactions left
open, records published again, and operators pause, retry, move back, replay, reshard and prune. Then everything is
healed and has to drain. A judge that shares no code with the engine compares ledgers, tables and topics.

It starts servers of its own, in containers if a Docker engine answers, and kills them. The same seed gives the same
configurations and faults, not the same interleaving. --state adds up several runs, and a run goes on behind the rounds
that are in the file. The directory with plan, log, ledgers and output of a round that failed stays; --plan plays that
plan again, also after faults were cut from it.

Exit status 1 if the promise was broken.`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if child {
				return worker.Run(cmd.Context(), cmd.InOrStdin(), cmd.ErrOrStderr(), func() { os.Exit(exitNotWell) })
			}
			t.out, t.options.Out = cmd.OutOrStdout(), cmd.OutOrStdout()
			if t.json {
				t.options.Out = cmd.ErrOrStderr()
			}
			return t.run(cmd.Context())
		},
	})
	flags := cmd.Flags()
	cli.AddInt(flags, &t.minutes, "minutes", torture.MinutesDefault, torture.MinutesMin, torture.MinutesMax, "no round but the first begins after this many minutes")
	cli.AddOption(flags, "seed", "number", "random", "seed of configurations and faults", t.parseSeed)
	cli.AddInt(flags, &t.options.Seconds, "round-seconds", torture.SecondsDefault, torture.SecondsMin, torture.SecondsMax, "how long faults are injected in each round")
	cli.AddInt(flags, &t.options.Rate, "rate", torture.RateDefault, torture.RateMin, torture.RateMax, "orders per second at most")
	cli.AddInt(flags, &t.pace, "faults-per-minute", torture.PaceDefault, torture.PaceMin, torture.PaceMax, "how many faults are injected per minute, on average")
	cli.AddBool(flags, &t.options.Bulk, "bulk", "more messages and fewer kinds of configurations: large transactions, batches and backlogs")
	cli.AddBool(flags, &t.options.Embedded, "embedded", "no containers, even if a Docker engine answers")
	cli.AddInt(flags, &t.options.Brokers, "broker-count", torture.BrokersDefault, torture.BrokersMin, torture.BrokersMax, "how many brokers Kafka has; with several, leaders and coordinators move, and one broker at a time is killed")
	cli.AddBool(flags, &t.rivals, "rivals", "play each round also with a pipeline as it is written by hand, and compare: a poller with SKIP LOCKED, and a consumer with and without claims")
	flags.StringVar(&t.options.RivalProgram, "rival-program", "", "with --rivals: `program` built in internal/torture/rivals, which plays as Watermill and as Debezium")
	flags.StringVar(&t.page, "rivals-page", "", "with --rivals: `file` to write the comparison to, as a page of documentation")
	cli.AddInt(flags, &t.options.Rounds, "rounds", 0, 0, torture.RoundsMax, "play this many rounds, whatever --minutes says; 0: --minutes decides")
	cli.AddBool(flags, &t.options.First, "until-broken", "stop after the first round that breaks the promise")
	cli.AddInt(flags, &t.options.ShrinkTries, "shrink", 0, 0, 100, "after a round that breaks the promise: cut faults from its plan, and play each cut up to this often; the result is short.json in its directory")
	cli.AddBool(flags, &t.options.Standby, "standby", "each round begins with a streaming standby, and promotions lose commits; takes no container")
	cli.AddDuration(flags, &t.options.Offset, "clock-offset", 0, -24*time.Hour, 24*time.Hour, "how far the database's clock is ahead of the programs'; needs a C compiler, and takes no container")
	flags.StringVar(&t.options.Other, "other-release", "", "`program` of another release, which every second relay runs")
	flags.StringVar(&t.options.State, "state", "", "`file` that remembers the rounds that are done, and adds them up")
	flags.StringVar(&t.options.Plan, "plan", "", "`file` with the plan of one round to play, instead of drawing")
	flags.StringVar(&t.options.Dir, "logs", "", "existing `directory` for the logs of rounds; default: the system's for temporary files")
	cli.AddJSON(cmd, &t.json)
	flags.Lookup("json").Usage = "end with one line of JSON; the log goes to stderr"
	cli.AddBool(flags, &child, flagTortureProcess, "be a process of the torture run")
	_ = flags.MarkHidden(flagTortureProcess) // fails only for a flag that is not there
	return cmd
}

// torturer is one run of the command.
type torturer struct {
	*cli.Settings

	options       torture.Options
	minutes, pace int
	rivals, json  bool
	page          string
	out           io.Writer
}

func (t *torturer) parseSeed(text string) error {
	if text == "random" {
		t.options.Seed = uint64(rand.Uint32()) //nolint:gosec // any number will do
		return nil
	}
	seed, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return errors.New("want a number from 0 on")
	}
	t.options.Seed = seed
	return nil
}

func (t *torturer) run(ctx context.Context) error {
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program, to start it as the processes of the run: %w", err)
	}
	t.options.Command, t.options.Program = []string{program, "torture", "--" + flagTortureProcess}, []string{program}
	t.options.Duration, t.options.Pace = time.Duration(t.minutes)*time.Minute, float64(t.pace)/60
	if t.rivals {
		return t.compare(ctx)
	}
	report, err := torture.Run(ctx, t.options)
	if err != nil {
		return err
	}
	if t.json {
		err = terminal.PrintJSON(t.out, report)
	} else {
		var text strings.Builder
		terminal.Add(&text, "%s, seed %d: %d rounds, %d faults\n%s\n", report.Environment, report.Seed, report.Rounds, report.Faults, report.String())
		for _, dir := range report.Logs {
			terminal.Add(&text, "a round that failed is in %s\n", dir)
		}
		_, err = io.WriteString(t.out, text.String())
	}
	if err == nil && report.Failed > 0 {
		return errUnhealthy
	}
	return err
}

// compare prints how rivals do.
func (t *torturer) compare(ctx context.Context) error {
	all, err := torture.Compare(ctx, t.options)
	if err != nil {
		return err
	}
	var text strings.Builder
	if t.page != "" {
		if err := os.WriteFile(t.page, []byte(torture.Page(all, t.commandLine())), 0o644); err != nil { //nolint:gosec // documentation is for all
			return err
		}
	}
	if t.json {
		return terminal.PrintJSON(t.out, all)
	}
	for line := range strings.Lines(torture.Table(all.Systems)) {
		terminal.Add(&text, "%s\n", strings.TrimSuffix(line, "\n"))
	}
	_, err = io.WriteString(t.out, text.String())
	return err
}

// commandLine is how to compare again.
func (t *torturer) commandLine() string {
	text := fmt.Sprintf("outbox-relay torture --rivals --seed %d --round-seconds %d --rate %d --faults-per-minute %d", t.options.Seed, t.options.Seconds, t.options.Rate, t.pace)
	if t.options.Rounds > 0 {
		text += fmt.Sprintf(" --rounds %d", t.options.Rounds)
	} else {
		text += fmt.Sprintf(" --minutes %d", t.minutes)
	}
	if t.options.Embedded {
		text += " --embedded"
	}
	if t.options.RivalProgram != "" {
		text += " --rival-program ./rivals"
	}
	return text + " --rivals-page docs/reference/rivals.md"
}
