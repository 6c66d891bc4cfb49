package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

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
					quiet, least := "-", ""
					if !r.Live() {
						quiet = human.Seconds(r.QuietSeconds)
					}
					if r.Dead == relays.DeadMax {
						least = "at least "
					}
					return terminal.Fill("%s\t%d\t%d\t%d\t%d\t%s%d\t%s", terminal.Plain(r.Relay), r.Shards, r.Leased, r.Replicas, r.Published, least, r.Dead, quiet)
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
