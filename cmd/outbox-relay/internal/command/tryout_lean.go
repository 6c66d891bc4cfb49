//go:build lean

package command

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
)

func tryout() (left []func(*cli.Settings) *cobra.Command) {
	for _, name := range []string{"demo", "torture", "servers", "bench"} {
		left = append(left, func(*cli.Settings) *cobra.Command {
			return &cobra.Command{
				Use: name, Hidden: true, DisableFlagParsing: true,
				RunE: func(*cobra.Command, []string) error {
					return fmt.Errorf("%s is not part of this program: it was built with -tags lean, as images are; build it without", name)
				},
			}
		})
	}
	return left
}
