package main

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
)

// noArgs refuses all arguments. It quotes them only through shown: one may be a database URL.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("%s takes no argument, got %s: see %s --help", cmd.CommandPath(), shown(args[0]), cmd.CommandPath())
	}
	return nil
}

// arguments requires least to most arguments.
func arguments(what string, least, most int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < least || len(args) > most {
			return fmt.Errorf("%s takes %s: see %s --help", cmd.CommandPath(), what, cmd.CommandPath())
		}
		return nil
	}
}

// oneID makes a command take the ID of a row.
func oneID(set func(id string) error) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != 1 {
			return fmt.Errorf("%s takes one ID: see %s --help", cmd.CommandPath(), cmd.CommandPath())
		}
		if args[0] == "" || len(args[0]) > 1024 || !utf8.ValidString(args[0]) || strings.ContainsRune(args[0], 0) {
			return errors.New("ID: want 1 to 1024 bytes of UTF-8")
		}
		return set(args[0])
	}
}
