package command

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/dedup/idempotency"
)

// reapMax bounds a run; the next run continues.
const reapMax = time.Hour

func newKeysReap(s *cli.Settings) *cobra.Command {
	cmd := cli.Needs(&cobra.Command{
		Use:   "reap",
		Short: "Forget keys whose window is over",
		Long: `Forget keys whose window is over, of all operations, in small transactions. A later request with such a key is executed
again. Unfinished keys stay while something can finish them. One whose request is not stored is forgotten if nothing of
it happened, and else becomes abandoned.

Programs with Flow.Run or Operation.Run do this by themselves. Where none does, run it every hour. It is not recorded.`,
		Example: `  outbox-relay keys reap
  outbox-relay keys reap --json`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), reapMax)
			defer cancel()
			return s.WithTables(ctx, true, func(ctx context.Context, conn *pgx.Conn) error {
				reaped, err := idempotency.Reap(ctx, conn, s.Schema)
				// Print it also after an error: keys are already forgotten then.
				text := human.Count(reaped.Forgotten, "key") + " forgotten"
				if reaped.Doubted > 0 {
					text += fmt.Sprintf("; %d need a decision now: \"outbox-relay keys list\"", reaped.Doubted)
				}
				if s.JSON {
					return errors.Join(err, terminal.PrintJSON(cmd.OutOrStdout(), map[string]any{"keys": reaped.Forgotten, "undecided": reaped.Doubted}))
				}
				return errors.Join(err, terminal.Say(cmd.OutOrStdout(), "%s\n", text))
			})
		},
	}, cli.FlagDatabaseURL)
	s.AddJSON(cmd)
	return cmd
}
