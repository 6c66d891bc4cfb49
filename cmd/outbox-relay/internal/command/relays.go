package command

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/relays"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

func newRelays(s *cli.Settings) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "relays",
		Short: "List the relays that the outbox knows, and delete retired ones",
	}
	cmd.AddCommand(newRelaysList(s), newRelaysDelete(s))
	return cmd
}

func newRelaysList(s *cli.Settings) *cobra.Command {
	cmd := cli.Needs(&cobra.Command{
		Use:   "list",
		Short: "List relays, and since when none of their replicas runs",
		Long: `List the relays that the outbox knows: shards, how many of them a replica holds, live replicas, and since when none
is live. A row leaves the outbox once every relay of this list has published it.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.Read(cmd.Context(), func(ctx context.Context, conn *pgx.Conn) error {
				all, err := relays.List(ctx, conn, s.Schema)
				if err != nil {
					return err
				}
				return list(cmd.OutOrStdout(), s.JSON, all, "no relays: none has run yet", "relay\tshards\theld\treplicas\tpublished\tdead\tquiet for", func(r relays.Relay) string {
					quiet := "-"
					if !r.Live() {
						quiet = human.Seconds(r.QuietSeconds)
					}
					return terminal.Fill("%s\t%d\t%d\t%d\t%d\t%d\t%s", terminal.Plain(r.Relay), r.Shards, r.Leased, r.Replicas, r.Published, r.Dead, quiet)
				})
			})
		},
	}, cli.FlagDatabaseURL)
	s.AddJSONLines(cmd)
	return cmd
}

func newRelaysDelete(s *cli.Settings) *cobra.Command {
	var by operator.By
	cmd := cli.Needs(&cobra.Command{
		Use:   "delete NAME",
		Short: "Delete a retired relay, so that the outbox keeps no rows for it",
		Long: `Delete a retired relay: its progress, number of shards and paused topics. The outbox then keeps no rows for it. Rows that
neither it nor another relay has published are not published. A relay started under the name later begins with the
oldest row in the outbox.

Refused while a replica of that name works or stands by, or while outbox_dead has rows of it. Deletions are recorded.`,
		Example: `  outbox-relay relays list
  outbox-relay relays delete old --why "renamed to eu-1"`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("%s takes one name: see \"outbox-relay relays list\"", cmd.CommandPath())
			}
			if args[0] == "" || len(args[0]) > 255 {
				return errors.New("name of a relay: want 1 to 255 bytes")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return s.OnSchema(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool) error {
				gone, err := relays.Delete(ctx, pool, s.Schema, args[0], by)
				if err != nil {
					return err
				}
				return say(cmd.OutOrStdout(), s.JSON, gone, "relay %s is deleted: progress of %s, %s\n", terminal.Plain(gone.Relay), human.Count(gone.Shards, "shard"), human.Count(gone.Paused, "paused topic"))
			})
		},
	}, cli.FlagDatabaseURL)
	addBy(s, cmd, &by, "")
	return cmd
}
