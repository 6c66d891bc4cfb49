package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/internal/operator"
	"github.com/effectonce/effectonce/internal/relays"
)

func newRelays(s *settings) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "relays",
		Short: "Look at the relays that the outbox knows by name, and delete one that never comes back",
	}
	cmd.AddCommand(newRelaysList(s), newRelaysDelete(s))
	return cmd
}

func newRelaysList(s *settings) *cobra.Command {
	var asJSON bool
	cmd := needs(&cobra.Command{
		Use:   "list",
		Short: "List relays by name, and since when nobody works under it",
		Long: `List the relays that the outbox knows: their shards and how many of them have a live lease, their replicas
that are alive, and since when nobody works under the name. A row leaves the outbox when every relay of this
list has published it. With --json there is one object a line. Exit status 1 if there is none.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), statusMax)
			defer cancel()
			return s.withTables(ctx, false, func(ctx context.Context, conn *pgx.Conn) error {
				all, err := relays.List(ctx, conn, s.schema)
				if err != nil {
					return err
				}
				if len(all) == 0 {
					return errors.New("no relay ever ran")
				}
				return printRelays(cmd.OutOrStdout(), all, asJSON)
			})
		},
	}, flagDatabaseURL)
	addJSON(cmd, &asJSON)
	return cmd
}

func printRelays(out io.Writer, all []relays.Relay, asJSON bool) error {
	var text strings.Builder
	text.WriteString("relay\tshards\tleased\treplicas\tpublished\tdead\tquiet for\n")
	for _, r := range all {
		if asJSON {
			if err := printJSON(out, r); err != nil {
				return err
			}
			continue
		}
		quiet := "-"
		if !r.Live() {
			quiet = seconds(r.QuietSeconds)
		}
		fmt.Fprintf(&text, "%s\t%d\t%d\t%d\t%d\t%d\t%s\n", plain(r.Relay), r.Shards, r.Leased, r.Replicas, r.Published, r.Dead, quiet)
	}
	if asJSON {
		return nil
	}
	return printTable(out, text.String())
}

func newRelaysDelete(s *settings) *cobra.Command {
	var by operator.By
	var asJSON bool
	cmd := needs(&cobra.Command{
		Use:   "delete NAME",
		Short: "Forget a relay that never comes back, so that the outbox keeps no rows for it",
		Long: `Forget a relay that never comes back: its progress, its number of shards, its paused topics. The outbox then
keeps no rows for it any more. What it has not published is published by nobody, unless another relay does; a
relay that is started under the name later begins with the oldest row that is still in the outbox.

It is refused while a replica works under the name or stands by, and while rows of it are in outbox_dead. Every
deletion is written down, with --why: see "outbox-relay actions list".`,
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
			if by.Who == "" {
				by.Who = whoami()
			}
			return s.onSchema(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool) error {
				gone, err := relays.Delete(ctx, pool, s.schema, args[0], by)
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), gone)
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "relay %s is forgotten: progress of %d shards, %d paused topics\n", plain(gone.Relay), gone.Shards, gone.Paused)
				return err
			})
		},
	}, flagDatabaseURL)
	addText(cmd.Flags(), "why", 2048, "why it is deleted; required", func(text string) error { by.Why = text; return nil })
	addText(cmd.Flags(), "by", 255, "who does it; default: the user and the machine", func(text string) error { by.Who = text; return nil })
	addJSON(cmd, &asJSON)
	commandLineOnly(cmd.Flags(), "why")
	s.checks[cmd] = func() error {
		if by.Why == "" {
			return errors.New("--why is missing: say why the relay is deleted")
		}
		return nil
	}
	return cmd
}
