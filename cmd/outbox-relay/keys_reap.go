package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/internal/keys"
)

// reapMax bounds a run; what is left is for the next one.
const reapMax = time.Hour

func newKeysReap(s *settings) *cobra.Command {
	var dryRun, asJSON bool
	cmd := needs(&cobra.Command{
		Use:   "reap",
		Short: "Forget finished keys whose window is over",
		Long: `Forget finished keys whose window is over, of all operations, in small transactions. A request that comes
again later is executed again: that is what the window says. Keys that are not finished stay, however old they
are, but for those that only count failures of work in one transaction, which had no effect: they go a day after
the last one. A key whose work committed by itself, and left no outcome, becomes indeterminate instead.

Programs with Flow.Run or Operation.Run do this by themselves. Run it every hour where none does; several at once
do not harm. It is not written down as an action.`,
		Example: `  outbox-relay keys reap --dry-run
  outbox-relay keys reap --json`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), reapMax)
			defer cancel()
			return s.withTables(ctx, !dryRun, func(ctx context.Context, conn *pgx.Conn) error {
				if dryRun {
					n, err := keys.Expired(ctx, conn, s.schema)
					if err != nil {
						return err
					}
					return printReaped(cmd, keys.Reaped{Forgotten: n}, true, asJSON)
				}
				screen := newScreen(cmd.ErrOrStderr())
				reaped, err := keys.Reap(ctx, conn, s.schema, func(r keys.Reaped) {
					if screen.terminal {
						screen.step("%d keys forgotten", r.Forgotten)
					}
				})
				screen.end()
				// Also after an error: what is forgotten is forgotten.
				if said := printReaped(cmd, reaped, false, asJSON); err == nil {
					err = said
				}
				return err
			})
		},
	}, flagDatabaseURL)
	addBool(cmd.Flags(), &dryRun, "dry-run", "only say how many would be forgotten")
	commandLineOnly(cmd.Flags(), "dry-run")
	addJSON(cmd, &asJSON)
	return cmd
}

func printReaped(cmd *cobra.Command, reaped keys.Reaped, dryRun, asJSON bool) error {
	n := reaped.Forgotten
	if asJSON {
		return printJSON(cmd.OutOrStdout(), map[string]any{"keys": n, "indeterminate": reaped.Doubted, "dry_run": dryRun})
	}
	text := fmt.Sprintf("%d keys forgotten", n)
	switch {
	case dryRun && n == keys.ExpiredMax:
		text = fmt.Sprintf("at least %d keys would be forgotten; nothing was done (--dry-run)", n)
	case dryRun:
		text = fmt.Sprintf("%d keys would be forgotten; nothing was done (--dry-run)", n)
	case reaped.Doubted > 0:
		text += fmt.Sprintf("; %d became indeterminate, since their work committed by itself, and left no outcome: \"outbox-relay keys list --state indeterminate\"", reaped.Doubted)
	}
	_, err := fmt.Fprintln(cmd.OutOrStdout(), text)
	return err
}
