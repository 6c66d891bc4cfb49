package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/internal/demo"
	"github.com/effectonce/effectonce/internal/servers"
)

// flagDemoProcess makes the program a child of the demo. It is a flag and no command of its own, so that
// it does not show among them.
const flagDemoProcess = "demo-process"

// sessionEmbedded is the session timeout on kfake, which takes a shorter one than Kafka's brokers do:
// more members are killed, and more zombies wake up, in the same time.
const sessionEmbedded = 3 * time.Second

// stopMax is how long the embedded servers may take to stop.
const stopMax = 20 * time.Second

func newDemo(s *settings) *cobra.Command {
	d := &demonstration{settings: s}
	var child bool
	cmd := plainKafka(&cobra.Command{
		Use:   "demo",
		Short: "Run the whole pipeline, break it while it runs, and check what came of it",
		Long: `Run the whole pipeline, break it while it runs, and check what came of it.

A shop writes orders, each with its event in one transaction. Two relays publish the events, three
consumers turn each into one effect. All are processes of their own. They are killed (SIGKILL), frozen
for longer than their lease or session and resumed, and messages are published again under the same
ID. At the end a checker that shares no code with the rest compares orders, topic and effects.

Without addresses it brings PostgreSQL (downloaded at the first run) and an in-process Kafka. With
--database-url and --brokers it uses those, with a schema, a topic and a consumer group of its own,
which it removes at the end.

Exit status 0 if every order had its effect exactly once and in order, 1 if not. With --without-dedup
the consumers do not claim messages, effects happen twice, and the status is 1.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if child {
				// Nothing is left to be told or tidied up when the parent is gone.
				orphaned := func() { os.Exit(exitNotWell) }
				return demo.RunProcess(cmd.Context(), cmd.InOrStdin(), cmd.ErrOrStderr(), orphaned)
			}
			d.out, d.progress = cmd.OutOrStdout(), cmd.OutOrStdout()
			if d.json {
				d.progress = cmd.ErrOrStderr()
			}
			return d.run(cmd.Context())
		},
	})
	flags := cmd.Flags()
	addInt(flags, &d.options.Orders, "orders", demo.OrdersDefault, demo.OrdersMin, demo.OrdersMax, "how many orders the shop places")
	addDuration(flags, &d.options.Duration, "duration", demo.DurationDefault, demo.DurationMin, demo.DurationMax, "how long orders are placed and processes are killed")
	addOption(flags, "seed", "number", "random", "which orders, and what is killed when; the same seed gives a run like that one", d.parseSeed)
	addBool(flags, &d.options.WithoutDedup, "without-dedup", "take the claim out of the consumers, to see that the checker notices")
	addJSON(cmd, &d.json)
	flags.Lookup("json").Usage = "end with one line of JSON; progress goes to stderr"
	addBool(flags, &child, flagDemoProcess, "be a process of the demo")
	_ = flags.MarkHidden(flagDemoProcess) // fails only for a flag that is not there
	s.checks[cmd] = func() error { return d.options.Check() }
	return cmd
}

// demonstration is one run of the command.
type demonstration struct {
	*settings
	options  demo.Options
	json     bool
	out      io.Writer
	progress io.Writer
}

func (d *demonstration) parseSeed(text string) error {
	if text == "random" {
		d.options.Seed = uint64(rand.Uint32()) //nolint:gosec // any number will do
		return nil
	}
	seed, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return errors.New("want a number from 0 on")
	}
	d.options.Seed = seed
	return nil
}

func (d *demonstration) run(ctx context.Context) (err error) {
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program, to start it as the processes of the demo: %w", err)
	}
	begin := time.Now()
	screen := newScreen(d.progress)
	screen.line("starting the servers (the first run downloads PostgreSQL)")
	address, err := d.databaseAddress()
	if err != nil {
		return err
	}
	postgres, err := servers.StartPostgres(ctx, servers.PostgresOptions{
		DatabaseURL: address, Embedded: d.pool == nil,
	})
	if err != nil {
		return err
	}
	defer stop(ctx, postgres.Stop, &err)
	kafka, err := servers.StartKafka(ctx, servers.KafkaOptions{Brokers: d.brokers, Embedded: len(d.brokers) == 0})
	if err != nil {
		return err
	}
	defer stop(ctx, kafka.Stop, &err)
	if kafka.Kind == servers.KindEmbedded {
		d.options.Session, d.options.Fake = sessionEmbedded, true
	}
	d.options.Command = []string{program, "demo", "--" + flagDemoProcess}
	d.options.DatabaseURL, d.options.Brokers = postgres.URL, kafka.Brokers
	d.options.Progress = screen.progress
	screen.line(postgres.Description)
	screen.line(kafka.Description)
	screen.line(fmt.Sprintf("1 shop, 2 relays, 3 consumers; %d orders; killed, frozen and sent twice for %s; --seed %d",
		d.options.Orders, short(d.options.Duration), d.options.Seed))
	report, err := demo.Run(ctx, d.options)
	screen.end()
	if err != nil {
		return err
	}
	for _, note := range report.Notes {
		screen.line("note: " + note)
	}
	result := newDemoResult(report, postgres.Description, kafka.Description, time.Since(begin))
	result.WithoutDedup = d.options.WithoutDedup
	if d.json {
		err = printJSON(d.out, result)
	} else {
		err = result.print(d.out)
	}
	if err == nil && !result.Held {
		return errNotWell
	}
	return err
}

// stop also runs after an interrupt.
func stop(ctx context.Context, server func(context.Context) error, err *error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopMax)
	defer cancel()
	*err = errors.Join(*err, server(ctx))
}
