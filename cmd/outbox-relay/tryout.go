//go:build !lean

package main

import "github.com/spf13/cobra"

// tryout returns the constructors of the commands that bring servers of their own. The build tag
// "lean" leaves them out, and with them embedded PostgreSQL, kfake, testcontainers and Watermill.
func tryout() []func(*settings) *cobra.Command {
	return []func(*settings) *cobra.Command{newDemo, newServers, newBench}
}
