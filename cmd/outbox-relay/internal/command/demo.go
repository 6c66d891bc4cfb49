//go:build !lean

package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/demo"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/internal/servers"
)

// flagDemoProcess makes the program a child of the demo. It is a flag, so that no extra command is
// listed.
const flagDemoProcess = "demo-process"

// sessionEmbedded is the session timeout on kfake, which accepts a shorter one than Kafka's
// brokers: more members are killed, and more zombies wake up, in the same time.
const sessionEmbedded = 3 * time.Second

func newDemo(s *cli.Settings) *cobra.Command {
	d := &demonstration{Settings: s}
	var child bool
	cmd := cli.PlainKafka(&cobra.Command{
		Use:   "demo",
		Short: "Run the whole pipeline, break it while it runs, and check the result",
		Long: `Run the whole pipeline, break it while it runs, and check the result.

A shop writes orders, each with its event in one transaction. Two relays publish the events, and three consumers turn
each into one effect. These processes are killed (SIGKILL), or frozen for longer than their lease or session and
resumed, and messages are published again under the same ID. Then a checker that shares no code with the rest compares
orders, topic and effects.

Without addresses it starts PostgreSQL (downloaded at the first run) and an in-process Kafka. With --database-url and
--brokers it uses a schema, a topic and a group of its own there, and removes them at the end.

Exit status 1 unless every order took effect exactly once and in order. With --without-dedup consumers do not claim
messages: effects happen twice, and the status is 1.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if child {
				// When the parent is gone there is nothing to report or to clean up.
				orphaned := func() { os.Exit(exitNotWell) }
				return demo.RunProcess(cmd.Context(), cmd.InOrStdin(), cmd.ErrOrStderr(), orphaned)
			}
			d.out, d.progress = cmd.OutOrStdout(), cmd.OutOrStdout()
			if d.JSON {
				d.progress = cmd.ErrOrStderr()
			}
			return d.run(cmd.Context())
		},
	})
	flags := cmd.Flags()
	cli.AddInt(flags, &d.options.Orders, "orders", demo.OrdersDefault, demo.OrdersMin, demo.OrdersMax, "how many orders the shop places")
	cli.AddDuration(flags, &d.options.Duration, "duration", demo.DurationDefault, demo.DurationMin, demo.DurationMax, "how long orders are placed and processes are killed")
	addSeed(flags, &d.options.Seed, "seed of orders, kills and freezes; the same seed gives a similar run")
	cli.AddBool(flags, &d.options.WithoutDedup, "without-dedup", "run consumers without claims, to see that the checker notices")
	d.AddJSON(cmd)
	flags.Lookup("json").Usage = "end with one line of JSON; progress goes to stderr"
	cli.AddBool(flags, &child, flagDemoProcess, "be a process of the demo")
	_ = flags.MarkHidden(flagDemoProcess) // fails only for a flag that is not there
	s.Check(cmd, d.options.Check)
	return cmd
}

// demonstration is one run of the command.
type demonstration struct {
	*cli.Settings
	options  demo.Options
	out      io.Writer
	progress io.Writer
}

func addSeed(flags *pflag.FlagSet, seed *uint64, usage string) {
	cli.AddOption(flags, "seed", "number", "random", usage, func(text string) (err error) {
		if text == "random" {
			*seed = uint64(rand.Uint32()) //nolint:gosec // any number will do
		} else if *seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			return errors.New("want a number from 0 on")
		}
		return nil
	})
}

func (d *demonstration) run(ctx context.Context) (err error) {
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program, to start it as the processes of the demo: %w", err)
	}
	begin := time.Now()
	screen := terminal.NewScreen(d.progress)
	on, err := startServers(ctx, d.Settings, nil, screen.Line)
	if err != nil {
		return err
	}
	defer on.stop(ctx, &err)
	d.options.Session = demo.SessionDefault
	if on.kafka.Kind == servers.KindEmbedded {
		d.options.Session = sessionEmbedded
	}
	d.options.Command = d.ChildCommand(program, "demo", "--"+flagDemoProcess)
	d.options.DatabaseURL, d.options.Brokers = on.postgres.URL, on.kafka.Brokers
	d.options.Progress = func(p demo.Progress) {
		screen.Step("%.0fs orders %d delivered %d effects %d duplicates %d kills %d freezes %d  %s",
			p.Elapsed.Seconds(), p.Orders, p.Delivered, p.Effects, p.Duplicates, p.Kills, p.Freezes, p.Phase)
	}
	screen.Line(fmt.Sprintf("1 shop, 2 relays, 3 consumers; %d orders; killed, frozen and sent twice for %s; --seed %d",
		d.options.Orders, human.Exact(d.options.Duration), d.options.Seed))
	report, err := demo.Run(ctx, d.options)
	screen.End()
	if err != nil {
		return err
	}
	for _, note := range report.Notes {
		screen.Line("note: " + note)
	}
	result := demoResult{
		Report: report, Held: report.Held(), WithoutDedup: d.options.WithoutDedup, Seconds: math.Round(time.Since(begin).Seconds()*10) / 10,
		Postgres: on.postgres.Description, Kafka: on.kafka.Description,
	}
	return answer(d.out, d.JSON, result, result.text(), result.Held)
}

// demoResult is the last line of "demo --json".
type demoResult struct {
	demo.Report
	Held         bool    `json:"held"`
	WithoutDedup bool    `json:"without_dedup"`
	Seconds      float64 `json:"seconds"` // starting the servers included
	Postgres     string  `json:"postgres"`
	Kafka        string  `json:"kafka"`
}

func (r demoResult) text() string {
	var text strings.Builder
	row := func(name string, n int) { terminal.Add(&text, "  %-48s %7d\n", name, n) }
	text.WriteString("\n")
	row("orders that the shop committed", r.Orders)
	row("orders delivered by Kafka", r.Delivered)
	row("duplicates that arrived", r.DuplicatesDelivered)
	row("effects", r.Effects)
	row("lost (orders without an effect)", r.Lost)
	row("doubled (effects beyond the first of an order)", r.Doubled)
	row("out of order", r.OutOfOrder)
	for _, rare := range []struct {
		name string
		n    int
	}{
		{"orders that never reached the topic", r.Undelivered},
		{"records and effects that belong to no order", r.Phantoms},
		{"customers with a wrong balance", r.WrongBalances},
		{"processes that ended by themselves", r.Crashes},
	} {
		if rare.n > 0 {
			row(rare.name, rare.n)
		}
	}
	row("processes killed (SIGKILL)", r.Kills)
	row("processes frozen and resumed", r.Freezes)
	text.WriteString("\n")
	for _, example := range r.Examples {
		terminal.Add(&text, "  %s\n", example)
	}
	terminal.Add(&text, "%.1f seconds, seed %d\n%s\n", r.Seconds, r.Seed, r.lastWord())
	return text.String()
}

func (r demoResult) lastWord() string {
	if r.Held {
		return fmt.Sprintf("The promise held: each of %d orders took effect exactly once and in order, through %d kills, %d freezes and %d duplicates.",
			r.Orders, r.Kills, r.Freezes, r.DuplicatesDelivered)
	}
	broken := fmt.Sprintf("The promise did NOT hold: %d lost, %d doubled, %d out of order.", r.Lost, r.Doubled, r.OutOfOrder)
	if r.WithoutDedup {
		broken += " The consumers ran without claims (--without-dedup): this is what claims prevent."
	}
	return broken
}
