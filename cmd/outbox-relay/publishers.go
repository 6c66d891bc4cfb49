package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/publishers"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

func newPublishers(s *cli.Settings) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "publishers",
		Short: "Limit which topics a role may publish to",
		Long: `Limit which topics a role may publish to. Without a list, a role that may insert into the outbox may publish to any
topic.

  outbox-relay publishers limit shop orders 'bills.*' --why "INC-12"
  outbox-relay publishers limit effectonce_publisher --none   # its members need lists of their own
  outbox-relay publishers free shop

A list applies to the role and its members, logins too, also after SET ROLE. A member of several listed roles has the
topics of all of them. Relays, the owner of the tables and superusers are not limited. A refused insert fails with
SQLSTATE 42501 and the topic's name.

The first list adds triggers that check each insert; removing the last list removes them. Only the owner of the tables
changes lists, also with psql: INSERT, UPDATE and DELETE on outbox_publishers.`,
	}
	cmd.AddCommand(newPublishersLimit(s), newPublishersFree(s), newPublishersList(s))
	return cmd
}

// roleBytesMax is PostgreSQL's limit for a name.
const roleBytesMax = 63

func checkRole(cmd *cobra.Command, args []string) error {
	if len(args) == 0 || args[0] == "" || len(args[0]) > roleBytesMax {
		return fmt.Errorf("%s takes the name of a role first, 1 to %d bytes", cmd.CommandPath(), roleBytesMax)
	}
	return nil
}

func newPublishersLimit(s *cli.Settings) *cobra.Command {
	var c topicsChange
	var none bool
	cmd := cli.Needs(&cobra.Command{
		Use:   "limit ROLE TOPIC...",
		Short: "Allow a role to publish to these topics only",
		Long: `Allow a role, and its members, to publish to these topics only; replaces an earlier list. A topic is a name, or a
prefix followed by *: quote it for the shell. With --none only members that another listed role includes can publish.

Messages scheduled earlier are still published. The first list waits at most 1.5 s for transactions that write to the
outbox. If they take longer nothing changes: repeat it. The change is recorded.`,
		Args: checkRole,
		RunE: func(cmd *cobra.Command, args []string) error {
			limited := publishers.Publisher{Role: args[0], Topics: append([]string{}, args[1:]...)}
			if none != (len(limited.Topics) == 0) {
				return usageError{errors.New("want topics, or --none")}
			}
			return c.publishers(cmd.Context(), s, func(ctx context.Context, pool *pgxpool.Pool) error {
				if err := publishers.Limit(ctx, pool, s.Schema, limited, c.by); err != nil {
					return err
				}
				if c.asJSON {
					return terminal.PrintJSON(cmd.OutOrStdout(), limited)
				}
				err := terminal.Say(cmd.OutOrStdout(), "role %s publishes to %s only\n", terminal.Plain(limited.Role), topicsText(limited))
				return err
			})
		},
	}, cli.FlagDatabaseURL)
	cli.AddBool(cmd.Flags(), &none, "none", "a list without topics")
	c.add(cmd)
	return cmd
}

func newPublishersFree(s *cli.Settings) *cobra.Command {
	var c topicsChange
	cmd := cli.Needs(&cobra.Command{
		Use:   "free ROLE",
		Short: "Remove a role's list",
		Long: `Remove a role's list. The role may then publish to any topic, unless it is a member of another listed role. Exit status 1
if it has no list. The change is recorded.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				return fmt.Errorf("%s takes one role", cmd.CommandPath())
			}
			return checkRole(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.publishers(cmd.Context(), s, func(ctx context.Context, pool *pgxpool.Pool) error {
				if err := publishers.Free(ctx, pool, s.Schema, args[0], c.by); err != nil {
					return err
				}
				if c.asJSON {
					return terminal.PrintJSON(cmd.OutOrStdout(), map[string]any{"role": args[0], "freed": true})
				}
				err := terminal.Say(cmd.OutOrStdout(), "role %s has no list any more\n", terminal.Plain(args[0]))
				return err
			})
		},
	}, cli.FlagDatabaseURL)
	c.add(cmd)
	return cmd
}

func (c *topicsChange) publishers(ctx context.Context, s *cli.Settings, change func(ctx context.Context, pool *pgxpool.Pool) error) error {
	if c.by.Who == "" {
		c.by.Who = whoami()
	}
	return s.OnSchema(ctx, change)
}

func newPublishersList(s *cli.Settings) *cobra.Command {
	var asJSON bool
	cmd := cli.Needs(&cobra.Command{
		Use:   "list",
		Short: "Show which roles are limited to which topics",
		Args:  cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.OnSchema(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool) error {
				all, err := publishers.List(ctx, pool, s.Schema)
				if err != nil {
					return err
				}
				if asJSON {
					return terminal.PrintObjects(cmd.OutOrStdout(), all)
				}
				return printPublishers(cmd.OutOrStdout(), all)
			})
		},
	}, cli.FlagDatabaseURL)
	cli.AddJSONLines(cmd, &asJSON)
	return cmd
}

func printPublishers(out io.Writer, all []publishers.Publisher) error {
	if len(all) == 0 {
		_, err := io.WriteString(out, "no role is limited: any role that may insert into the outbox may publish to any topic\n")
		return err
	}
	for _, p := range all {
		if err := terminal.Say(out, "%s  %s\n", terminal.Plain(p.Role), topicsText(p)); err != nil {
			return err
		}
	}
	return nil
}

// topicsText needs no quotes: the table takes letters, digits and .-_* only.
func topicsText(p publishers.Publisher) string {
	if len(p.Topics) == 0 {
		return "no topic"
	}
	return strings.Join(p.Topics, ", ")
}
