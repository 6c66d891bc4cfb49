package command

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/trace"
)

func newReplay(s *cli.Settings) *cobra.Command {
	var opts trace.ReplayOptions
	var timeout time.Duration
	var yes bool
	cmd := cli.Needs(&cobra.Command{
		Use:   "replay --from TIME --yes",
		Short: "Publish published rows again that are still in the outbox",
		Long: `Put rows into the outbox again that --relay has published and that are still there ("run --keep" sets how long), with
the same IDs and times, in outbox order. Every relay of the outbox then publishes them. --from (inclusive) and --to
(exclusive) are times of created_at. Without --yes the rows are only counted.
Consumers that deduplicate drop messages that they know. Rows land behind newer records of their key: for consumers
that do not deduplicate, that start now, or that missed messages, use a new topic (--to-topic).
Waiting, dead and discarded rows are left out. Rows come as they were written, also those that were corrected while they
were dead. All rows are inserted in one transaction, or none; it is recorded. What is written later is published later:
divide a replay of millions of rows by time.`,
		Example: `  outbox-relay replay --from 2026-03-01T08:00:00Z --to 2026-03-01T09:00:00Z
  outbox-relay replay --from 2026-03-01T08:00:00Z --to 2026-03-01T09:00:00Z --topic orders --to-topic orders-again --yes`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			opts.Schema, opts.Relay = s.Schema, s.Relay
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			return s.WithTables(ctx, yes, func(ctx context.Context, conn *pgx.Conn) error {
				do, text := trace.CountReplay, "would be published again; nothing was done: --yes publishes them"
				if yes {
					do, text = trace.Replay, "put into the outbox again, from where relays publish them"
				}
				rows, err := do(ctx, conn, opts)
				if err != nil {
					return err
				}
				printed := struct {
					Rows int64 `json:"rows"`
					Done bool  `json:"done"`
				}{rows, yes}
				return say(cmd.OutOrStdout(), s.JSON, printed, "%s %s\n", human.Count(rows, "row"), text)
			})
		},
	}, cli.FlagDatabaseURL)
	flags := cmd.Flags()
	addTime(flags, "from", "first time", func(at time.Time) { opts.From = at })
	addTime(flags, "to", "end; default: all that is published", func(at time.Time) { opts.To = &at })
	cli.AddText(flags, "topic", 249, "only rows of this topic", cli.Into(&opts.Topic))
	cli.AddText(flags, "to-topic", 249, "publish to this topic instead of the row's, as in the outbox: without the relay's prefix", cli.Into(&opts.ToTopic))
	cli.AddBool(flags, &yes, cli.FlagYes, "publish; without it the rows are counted")
	cli.AddDuration(flags, &timeout, "timeout", time.Hour, time.Second, 30*24*time.Hour, "time limit of the command")
	cli.CommandLineOnly(flags, "from", "to", "topic", "to-topic")
	addBy(s, cmd, &opts.By, "replayed by hand")
	s.Check(cmd, func() error {
		if opts.From.IsZero() {
			return errors.New("--from is missing: want a time")
		}
		if opts.To != nil && !opts.From.Before(*opts.To) {
			return errors.New("--to: want a time later than --from")
		}
		return nil
	})
	return cmd
}

func addTime(flags *pflag.FlagSet, name, usage string, set func(time.Time)) {
	cli.AddText(flags, name, 64, usage, func(text string) error {
		at, err := time.Parse(time.RFC3339Nano, text)
		if err != nil {
			return errors.New("want a time such as 2026-03-01T08:00:00Z")
		}
		set(at)
		return nil
	})
}
