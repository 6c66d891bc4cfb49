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

	"github.com/effectonce/effectonce/internal/operator"
	"github.com/effectonce/effectonce/internal/replay"
)

func newReplay(s *settings) *cobra.Command {
	opts := replay.Options{By: operator.By{Why: "replayed by hand"}}
	var timeout time.Duration
	var asJSON bool
	cmd := needs(&cobra.Command{
		Use:   "replay",
		Short: "Publish rows again that are published and still in the outbox",
		Long: `Publish rows again, with the same IDs and in the order of the outbox: those that --relay has published, from
--from on and before --to, that are still in the outbox (run --keep says for how long they stay). Both are times
of created_at, or ticks, as "outbox-relay positions" shows them: then what was committed after the first and
before the second counts. Ticks that no relay stands on are forgotten after some ten minutes.

Rows go where the relay has sent them if --topic-prefix and --routes are those of the relay.

Consumers that deduplicate drop what they know; a new topic (--to-topic) gets what a consumer missed, or a
consumer that begins. Behind newer records of its key a row stands in a place that is not its own: for whoever
does not deduplicate, choose another topic.

Rows that wait for the relay are left to it, and so are dead rows and those that somebody discarded with this
command line. The relay's progress is not touched; it may run meanwhile. At a row that Kafka does not take it ends,
with an error that names the row, and no later row of the same key is published. The replay is written down: see
"outbox-relay actions list". Exit status 1 if rows left the outbox before they were read.`,
		Example: `  outbox-relay replay --from 2026-03-01T08:00:00Z --to 2026-03-01T09:00:00Z --dry-run
  outbox-relay replay --from 2026-03-01T08:00:00Z --to 2026-03-01T09:00:00Z --topic orders --to-topic orders-again
  outbox-relay replay --from 4711 --topic orders --to-topic orders-again       # all that was published since the tick`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			opts.Schema, opts.Relay = s.schema, s.relay
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			return s.replay(ctx, opts, asJSON, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}, flagDatabaseURL, flagBrokers)
	flags := cmd.Flags()
	addBound(flags, "from", "time or tick from which on rows are published again", &opts.From)
	addBound(flags, "to", "time or tick where that ends; default: all that is published", &opts.To)
	addText(flags, "topic", 249, "only rows of this topic", into(&opts.Topic))
	addText(flags, "to-topic", 249, "publish to this topic of Kafka, not to that of the row", into(&opts.ToTopic))
	addRoutes(flags, &opts.Routes)
	addBool(flags, &opts.DryRun, "dry-run", "count the rows, and do nothing")
	addText(flags, "by", 255, "who does it; default: the user and the machine", func(text string) error { opts.By.Who = text; return nil })
	addText(flags, "why", 2048, "why it is done", func(text string) error { opts.By.Why = text; return nil })
	addDuration(flags, &timeout, "timeout", time.Hour, time.Second, 30*24*time.Hour, "how long all of it may take")
	commandLineOnly(flags, "from", "to", "topic", "to-topic", "dry-run", "why")
	addJSON(cmd, &asJSON)
	s.checks[cmd] = func() error {
		if opts.From.IsZero() {
			return errors.New("want --from, a time or a tick")
		}
		early, late := opts.From, opts.To
		if early.Tick != 0 && late.Tick != 0 && early.Tick >= late.Tick || !early.Time.IsZero() && !late.Time.IsZero() && !early.Time.Before(late.Time) {
			return errors.New("--to: want a time, or a tick, later than --from")
		}
		return nil
	}
	return cmd
}

func addBound(flags *pflag.FlagSet, name, usage string, target *replay.Bound) {
	addText(flags, name, 64, usage, func(text string) (err error) {
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

func (s *settings) replay(ctx context.Context, opts replay.Options, asJSON bool, out, progress io.Writer) error {
	if opts.By.Who == "" {
		opts.By.Who = whoami()
	}
	return s.withTables(ctx, false, func(ctx context.Context, conn *pgx.Conn) error {
		screen := newScreen(progress)
		if screen.terminal {
			opts.Progress = func(done int64) { screen.step("published: %d", done) }
		}
		report, err := replay.Run(ctx, conn, s.kafkaOptions(s.logger(progress)), opts)
		screen.end()
		if err != nil {
			return fmt.Errorf("%d rows are published again: %w", report.Published, err)
		}
		switch {
		case asJSON:
			err = printJSON(out, report)
		case opts.DryRun:
			_, err = fmt.Fprintf(out, "%d rows would be published again\n", report.Rows)
		default:
			_, err = fmt.Fprintf(out, "%d of %d rows are published again%s\n", report.Published, report.Rows, noted(report.Dropped, ", %d are dropped by a rule"))
		}
		if err == nil && !opts.DryRun && report.Published+report.Dropped < report.Rows {
			return errNotWell
		}
		return err
	})
}

// noted is empty for 0.
func noted(n int64, format string) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(format, n)
}
