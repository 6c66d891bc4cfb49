package command

import (
	"cmp"
	"errors"
	"os"
	account "os/user"
	"strings"

	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

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
