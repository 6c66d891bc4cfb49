package command

import (
	"os"
	"os/user"
	"strings"

	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// addBy adds the flags of an order that is recorded: --why, which only comes from the command line,
// --by and --json.
func addBy(cmd *cobra.Command, by *operator.By, asJSON *bool, why string) {
	cli.AddText(cmd.Flags(), "why", 2048, why, func(text string) error { by.Why = text; return nil })
	cli.AddText(cmd.Flags(), "by", 255, "operator; default: user@host", func(text string) error { by.Who = text; return nil })
	cli.AddJSON(cmd, asJSON)
	cli.CommandLineOnly(cmd.Flags(), "why")
}

// sign says that the user of this host gives the order, unless --by says who does.
func sign(by *operator.By) {
	if by.Who != "" {
		return
	}
	name, host := "unknown", "unknown"
	if u, err := user.Current(); err == nil && u.Username != "" {
		name = u.Username
	}
	if h, err := os.Hostname(); err == nil && h != "" {
		host = h
	}
	who := strings.ReplaceAll(strings.ToValidUTF8(name+"@"+host, "?"), "\x00", "?")
	by.Who = strings.ToValidUTF8(who[:min(len(who), 255)], "")
}
