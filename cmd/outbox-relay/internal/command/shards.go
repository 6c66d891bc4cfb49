package command

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/relay"
)

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
