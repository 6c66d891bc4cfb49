package command

import (
	"cmp"
	"context"
	"errors"
	"os"
	account "os/user"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

func newActions(s *cli.Settings) *cobra.Command {
	return group(&cobra.Command{
		Use:   "actions",
		Short: "Show what operators did",
	}, newActionsList(s))
}

func newActionsList(s *cli.Settings) *cobra.Command {
	var filter operator.ActionFilter
	var limit int
	cmd := cli.Needs(&cobra.Command{
		Use:   "list",
		Short: "List what operators did, the newest first",
		Long:  "List every change, the newest first: when, who, what and with which choice, to what, and why.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.Read(cmd.Context(), func(ctx context.Context, conn *pgx.Conn) error {
				actions, err := operator.Actions(ctx, conn, s.Schema, filter, limit)
				if err != nil {
					return err
				}
				return list(cmd.OutOrStdout(), s.JSON, actions, "no actions", "when\twho\twhat\tchoice\tto what\twhy", func(a operator.Action) string {
					return terminal.Fill("%s\t%s\t%s\t%s\t%s\t%s", a.When.UTC().Format(time.RFC3339), terminal.Clip(a.By(), keyWidth), a.What, cmp.Or(a.Choice(), "-"), a.Object(), terminal.Clip(a.Why, errorWidth))
				})
			})
		},
	}, cli.FlagDatabaseURL)
	cli.AddAge(cmd.Flags(), &filter.YoungerThan, "younger-than", "done less than this long ago")
	cli.AddInt(cmd.Flags(), &limit, flagLimit, listMax, 1, 100_000, "list at most this many")
	s.AddJSONLines(cmd)
	return cmd
}

// actionsText is what operators did, as the commands that show one thing have it.
func actionsText(actions []operator.Action) string {
	var text strings.Builder
	for i, a := range actions {
		if i == 0 {
			text.WriteString("operators\n")
		}
		terminal.Add(&text, "  %s  %s  %s: %s\n", a.When.UTC().Format(time.RFC3339), a.By(), whatText(&a), terminal.Clip(a.Why, 200))
	}
	return text.String()
}

// whatText is an action with its choice.
func whatText(a *operator.Action) string {
	if choice := a.Choice(); choice != "" {
		return a.What + " (" + choice + ")"
	}
	return a.What
}

// addBy adds the flags of a command whose change is recorded: --why, which only comes from the command line,
// --by and --json. otherwise is recorded if --why is not given; empty: it is required.
func addBy(s *cli.Settings, cmd *cobra.Command, by *operator.By, otherwise string) {
	usage := "reason"
	if otherwise == "" {
		usage += "; required"
	}
	cli.AddText(cmd.Flags(), "why", 2048, usage, func(text string) error { by.Why = text; return nil })
	cli.AddText(cmd.Flags(), "by", 255, "operator; default: user@host", func(text string) error { by.Who = text; return nil })
	s.AddJSON(cmd)
	cli.CommandLineOnly(cmd.Flags(), "why")
	s.Check(cmd, func() error {
		by.Who = cmp.Or(by.Who, user())
		if by.Why = cmp.Or(by.Why, otherwise); by.Why == "" {
			return errors.New("--why is missing: say why it is done")
		}
		return nil
	})
}

// user names the user of this host.
func user() string {
	name, host := "unknown", "unknown"
	if u, err := account.Current(); err == nil && u.Username != "" {
		name = u.Username
	}
	if h, err := os.Hostname(); err == nil && h != "" {
		host = h
	}
	who := strings.ReplaceAll(strings.ToValidUTF8(name+"@"+host, "?"), "\x00", "?")
	return strings.ToValidUTF8(who[:min(len(who), 255)], "")
}
