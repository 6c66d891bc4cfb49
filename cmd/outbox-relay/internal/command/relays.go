package command

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/relays"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/relay"
)

func newRelays(s *cli.Settings) *cobra.Command {
	return group(&cobra.Command{
		Use:   "relays",
		Short: "List the relays that the outbox knows, and delete retired ones",
	}, newRelaysList(s), newRelaysDelete(s))
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

const shardsMax = 256

func newShards(s *cli.Settings) *cobra.Command {
	var by operator.By
	cmd := cli.Needs(&cobra.Command{
		Use:   "shards NUMBER",
		Short: "Change the number of shards of a relay",
		Long: `Change the number of shards into which a relay divides the keys. One replica at a time publishes a shard, so this is
how many replicas can publish; each shard reads the whole outbox, so more shards than replicas gain nothing.

Stop all replicas of the relay first, and start them afterwards. Exit status 1 while a replica is alive, or holds a lease
that is not over: after a kill that takes up to its --lease. Every shard begins at the floor: what was published since
the oldest transaction began that was open lately is published again, under the same IDs, also with --exactly-once. The
rows of a key stay in order and nothing is lost. The change is recorded. "outbox-relay positions" shows the shards.`,
		Args: cli.Arguments("one number", 1, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			number, err := strconv.ParseInt(args[0], 10, 16)
			if err != nil || number < 1 || number > shardsMax {
				return usageError{fmt.Errorf("number of shards %q: want 1 to %d", args[0], shardsMax)}
			}
			return s.OnSchema(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool) error {
				before, err := relay.SetShards(ctx, pool, relayOperator(s, by), int16(number))
				switch {
				case errors.Is(err, relay.ErrUnknownRelay):
					return fmt.Errorf("%w: --shards of its first \"outbox-relay run\" sets the number", err)
				case err != nil:
					return err
				}
				text := "has " + human.Count(before, "shard")
				if int64(before) != number {
					text = fmt.Sprintf("had %s and has %d: start its replicas", human.Count(before, "shard"), number)
				}
				return say(cmd.OutOrStdout(), s.JSON, map[string]any{"relay": s.Relay, "before": before, "shards": number}, "relay %s %s\n", terminal.Plain(s.Relay), text)
			})
		},
	}, cli.FlagDatabaseURL)
	addBy(s, cmd, &by, "by hand")
	return cmd
}
