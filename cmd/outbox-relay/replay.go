package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/replay"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

func newReplay(s *cli.Settings) *cobra.Command {
	opts := replay.Options{By: operator.By{Why: "replayed by hand"}}
	var timeout time.Duration
	var asJSON bool
	cmd := cli.AsksKafka(cli.Needs(&cobra.Command{
		Use:   "replay",
		Short: "Publish published rows again that are still in the outbox",
		Long: `Publish rows again that --relay has published and that are still in the outbox ("run --keep" sets how long), with the
same IDs, in outbox order. --from (inclusive) and --to (exclusive) are times of created_at, or ticks of "outbox-relay
positions": rows committed after the first and before the second. Unused ticks are forgotten after about ten minutes.
Give the relay's --topic-prefix, so that rows go where it sent them.

Consumers that deduplicate drop messages that they know. Rows land behind newer records of their key: for consumers
that do not deduplicate, that start now, or that missed messages, use a new topic (--to-topic).

Waiting, dead and discarded rows are left out. The relay may run at the same time; its progress does not change. The
replay stops with an error at a row that Kafka refuses; no later row of its key is published. It is recorded. Exit
status 1 if rows left the outbox before they were read.`,
		Example: `  outbox-relay replay --from 2026-03-01T08:00:00Z --to 2026-03-01T09:00:00Z --dry-run
  outbox-relay replay --from 2026-03-01T08:00:00Z --to 2026-03-01T09:00:00Z --topic orders --to-topic orders-again
  outbox-relay replay --from 4711 --topic orders --to-topic orders-again       # all since the tick`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			opts.Schema, opts.Relay = s.Schema, s.Relay
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			return runReplay(ctx, s, opts, asJSON, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}, cli.FlagDatabaseURL, cli.FlagBrokers))
	flags := cmd.Flags()
	addBound(flags, "from", "first time or tick", &opts.From)
	addBound(flags, "to", "end, a time or tick; default: all that is published", &opts.To)
	cli.AddText(flags, "topic", 249, "only rows of this topic", cli.Into(&opts.Topic))
	cli.AddText(flags, "to-topic", 249, "publish to this Kafka topic instead of the row's", cli.Into(&opts.ToTopic))
	addTopicPrefix(flags, &opts.TopicPrefix)
	cli.AddBool(flags, &opts.DryRun, "dry-run", "only count the rows")
	cli.AddText(flags, "by", 255, "operator; default: user@host", func(text string) error { opts.By.Who = text; return nil })
	cli.AddText(flags, "why", 2048, "reason", func(text string) error { opts.By.Why = text; return nil })
	cli.AddDuration(flags, &timeout, "timeout", time.Hour, time.Second, 30*24*time.Hour, "time limit of the command")
	cli.CommandLineOnly(flags, "from", "to", "topic", "to-topic", "dry-run", "why")
	cli.AddJSON(cmd, &asJSON)
	s.Check(cmd, func() error {
		if opts.From.IsZero() {
			return errors.New("--from is missing: want a time or a tick")
		}
		early, late := opts.From, opts.To
		if early.Tick != 0 && late.Tick != 0 && early.Tick >= late.Tick || !early.Time.IsZero() && !late.Time.IsZero() && !early.Time.Before(late.Time) {
			return errors.New("--to: want a time, or a tick, later than --from")
		}
		return nil
	})
	return cmd
}

func addBound(flags *pflag.FlagSet, name, usage string, target *replay.Bound) {
	cli.AddText(flags, name, 64, usage, func(text string) (err error) {
		if target.Tick, err = strconv.ParseInt(text, 10, 64); err == nil && target.Tick > 0 {
			return nil
		}
		target.Tick = 0
		if target.Time, err = time.Parse(time.RFC3339Nano, text); err != nil {
			return errors.New("want a time such as 2026-03-01T08:00:00Z, or a tick, which is a number above 0")
		}
		return nil
	})
}

func runReplay(ctx context.Context, s *cli.Settings, opts replay.Options, asJSON bool, out, progress io.Writer) error {
	sign(&opts.By)
	return s.WithTables(ctx, false, func(ctx context.Context, conn *pgx.Conn) error {
		screen := terminal.NewScreen(progress)
		if screen.Overwrites() {
			opts.Progress = func(done int64) { screen.Step("published: %d", done) }
		}
		report, err := replay.Run(ctx, conn, s.KafkaOptions(s.Logger(progress)), opts)
		screen.End()
		if err != nil {
			return fmt.Errorf("%s published again: %w", human.Count(report.Published, "row"), err)
		}
		switch {
		case asJSON:
			err = terminal.PrintJSON(out, report)
		case opts.DryRun:
			err = terminal.Say(out, "%s would be published again\n", human.Count(report.Rows, "row"))
		default:
			err = terminal.Say(out, "%d of %s published again\n", report.Published, human.Count(report.Rows, "row"))
		}
		if err == nil && !opts.DryRun && report.Published < report.Rows {
			return errUnhealthy
		}
		return err
	})
}
