package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/internal/operator"
	"github.com/effectonce/effectonce/relay"
)

const shardsMax = 256

func newShards(s *settings) *cobra.Command {
	by := operator.By{Why: "by hand"}
	var asJSON bool
	cmd := needs(&cobra.Command{
		Use:   "shards NUMBER",
		Short: "Change into how many shards a relay divides the keys",
		Long: `Change into how many shards a relay divides the keys. Each shard is published by one replica at a time, so
this is how many replicas can publish. The running replicas change it by themselves: one takes all shards,
publishes each up to the same moment and begins the new ones there. The rows of a key stay in order, nothing
is lost; publishing goes on meanwhile and pauses for about a second. "outbox-relay positions" shows the shards.

Each shard reads the whole outbox and leaves out the others' rows: more shards than replicas gain nothing.

  outbox-relay shards 3`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			number, err := strconv.ParseInt(args[0], 10, 16)
			if err != nil || number < 1 || number > shardsMax {
				return usageError{fmt.Errorf("number of shards %q: want 1 to %d", args[0], shardsMax)}
			}
			if by.Who == "" {
				by.Who = whoami()
			}
			return s.onSchema(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool) error {
				now, err := relay.SetShards(ctx, pool, s.operator(by), int16(number))
				switch {
				case errors.Is(err, relay.ErrUnknownRelay):
					return fmt.Errorf("%w: its first \"outbox-relay run --shards\" decides", err)
				case err != nil:
					return err
				case asJSON:
					return printJSON(cmd.OutOrStdout(), map[string]any{"relay": s.relay, "shards": now, "wanted": number})
				case int64(now) == number:
					_, err = fmt.Fprintf(cmd.OutOrStdout(), "relay %s has %d shards\n", plain(s.relay), now)
				default:
					_, err = fmt.Fprintf(cmd.OutOrStdout(), "relay %s has %d shards, and will have %d as soon as a replica runs\n", plain(s.relay), now, number)
				}
				return err
			})
		},
	}, flagDatabaseURL)
	addText(cmd.Flags(), "why", 2048, "why it is done", func(text string) error { by.Why = text; return nil })
	addText(cmd.Flags(), "by", 255, "who does it; default: the user and the machine", func(text string) error { by.Who = text; return nil })
	addJSON(cmd, &asJSON)
	commandLineOnly(cmd.Flags(), "why")
	return cmd
}
