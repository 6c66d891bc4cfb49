//go:build !lean

package command

import (
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
)

// tryout returns the constructors of the commands that bring servers of their own. The build tag
// "lean" leaves them out, and with them embedded PostgreSQL, kfake and testcontainers.
func tryout() []func(*cli.Settings) *cobra.Command {
	return []func(*cli.Settings) *cobra.Command{newDemo, newServers, newBench}
}
