package command

import (
	"context"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/bounds"
)

// pruneMax bounds a run, which waits for locks in short steps and sweeps a bounded part.
const pruneMax = 10 * time.Minute

func newPrune(s *cli.Settings) *cobra.Command {
	var dryRun bool
	cmd := cli.Needs(&cobra.Command{
		Use:   "prune",
		Short: "Forget claims that no dedup window needs any more",
		Long: `Maintain the partitions of claims: create those of the coming days, truncate days that no consumer needs any more, sweep
claims that cannot be forgotten by the day, and drop empty partitions. A day goes once the longest dedup window of all
consumers is over and every stored position has passed it; consumers.forgotten_to records it.

Running consumers do this about every minute, if their role may change the tables. Otherwise run this every hour, as
the owner of the tables.

Exit status 1 if another process does it, or if a lock was not available: try again.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.OnSchemaFor(cmd.Context(), pruneMax, func(ctx context.Context, pool *pgxpool.Pool) error {
				return prune(ctx, pool, s.Schema, dryRun, s.JSON, cmd.OutOrStdout())
			})
		},
	}, cli.FlagDatabaseURL)
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "only show what would be forgotten and dropped")
	s.AddJSON(cmd)
	return cmd
}

func prune(ctx context.Context, pool *pgxpool.Pool, schema string, dryRun, asJSON bool, out io.Writer) error {
	claims, err := dedup.New(dedup.Config{Schema: schema})
	if err != nil {
		return err
	}
	report, failed := claims.Maintain(ctx, pool, dedup.MaintainOptions{Owner: bounds.Owner(), DryRun: dryRun})
	if failed != nil && report.Horizon.IsZero() {
		return failed // before it looked
	}
	return errors.Join(failed, answer(out, asJSON, report, pruneText(report, dryRun), !report.Elsewhere))
}

func pruneText(r dedup.Report, dryRun bool) string {
	if r.Elsewhere {
		return "another process is pruning\n"
	}
	var text strings.Builder
	list := func(what string, names []string) {
		if len(names) > 0 {
			terminal.Add(&text, "%s %s: %s\n", what, human.Count(len(names), "day"), strings.Join(names, ", "))
		}
	}
	list("created", r.Made)
	forgot, dropped := "forgot", "dropped"
	if dryRun {
		forgot, dropped = "would forget", "would drop"
	}
	list(forgot, r.Truncated)
	list(dropped, r.Dropped)
	if r.Swept > 0 && !dryRun {
		terminal.Add(&text, "swept %s\n", human.Count(r.Swept, "claim"))
	}
	if r.Horizon.IsZero() {
		text.WriteString("nothing may be forgotten yet\n")
	} else {
		terminal.Add(&text, "claims up to %s may be forgotten, in whole days\n", r.Horizon.UTC().Format(time.RFC3339))
	}
	if r.HeldBack != "" {
		terminal.Add(&text, "claims are kept beyond every window for the position of %s\n", terminal.Plain(r.HeldBack))
	}
	return text.String()
}
