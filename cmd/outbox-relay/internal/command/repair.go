package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/relay"
)

func newRepair(s *cli.Settings) *cobra.Command {
	var by operator.By
	var dryRun bool
	cmd := cli.Needs(&cobra.Command{
		Use:   "repair",
		Short: "Repair a sequence of the outbox that went back",
		Long: `Repair a sequence of the outbox that went back: after logical replication (which does not copy sequences), TRUNCATE
... RESTART IDENTITY, or setval. Without the repair, new rows get numbers that relays take for published.

The sequence moves above every known number. Rows not proven to be published get new numbers, in their order, and are
published: some for the second time, under the same IDs; none is lost. All relays take their leases again and continue.
If no sequence went back nothing changes.

Until then relays publish and remove nothing. Run this as an operator or as the owner of the tables. Transactions that
write to the outbox wait about as long as a bulk insert of the renumbered rows takes. The repair is recorded.

Exit status 1 if transactions that write to the outbox stay open for more than three seconds: try again. With
--dry-run also if there is something to repair.`,
		Example: `  outbox-relay repair --dry-run
  outbox-relay repair --why "upgrade by logical replication"`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			limit := time.Hour // a repair of many rows takes long
			if dryRun {
				limit = cli.ChangeMax
			}
			return s.OnSchemaFor(cmd.Context(), limit, func(ctx context.Context, pool *pgxpool.Pool) error {
				if dryRun {
					return describeSequences(ctx, pool, s.Schema, s.JSON, cmd.OutOrStdout())
				}
				return repairSequences(ctx, pool, relay.Operator{Schema: s.Schema, Who: by.Who, Why: by.Why}, s.JSON, cmd.OutOrStdout())
			})
		},
	}, cli.FlagDatabaseURL)
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "only show what is wrong")
	addBy(s, cmd, &by, "by hand")
	return cmd
}

func describeSequences(ctx context.Context, pool *pgxpool.Pool, schema string, asJSON bool, out io.Writer) error {
	state, err := relay.ReadSequences(ctx, pool, schema)
	if err != nil {
		return err
	}
	text := fmt.Sprintf("nothing to repair: rows have numbers up to %d, ticks up to %d\n", state.SeqLast, state.TickLast)
	if state.Behind {
		text = fmt.Sprintf("to repair: the sequence of rows is at %d, the largest known number is %d; that of ticks is at %d, the largest is %d\n",
			state.SeqLast, state.SeqKnown, state.TickLast, state.TickKnown)
	}
	if state.Reused != nil {
		text += fmt.Sprintf("the row with seq %d has a number that was used before\n", *state.Reused)
	}
	return answer(out, asJSON, state, text, !state.Behind)
}

func repairSequences(ctx context.Context, pool *pgxpool.Pool, opts relay.Operator, asJSON bool, out io.Writer) error {
	done, err := relay.Repair(ctx, pool, opts)
	switch {
	case errors.Is(err, relay.ErrSequenceBusy):
		return fmt.Errorf("%w: try again, or look for them with \"outbox-relay doctor\"", err)
	case err != nil:
		return err
	}
	text := "nothing to repair\n"
	if done.Repaired {
		text = fmt.Sprintf("repaired: %d rows got new numbers; the sequence of rows was at %d and is at %d, that of ticks was at %d and is at %d\n",
			done.Renumbered, done.SeqBefore, done.SeqAfter, done.TickBefore, done.TickAfter)
	}
	return answer(out, asJSON, done, text, true)
}
