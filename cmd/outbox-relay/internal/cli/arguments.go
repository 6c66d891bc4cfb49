package cli

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
)

// NoArgs refuses all arguments. It quotes them only through Shown: one may be a database URL.
func NoArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("%s takes no argument, got %s: see %s --help", cmd.CommandPath(), Shown(args[0]), cmd.CommandPath())
	}
	return nil
}

// Arguments requires least to most arguments. what describes them in the error, as "one number".
func Arguments(what string, least, most int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < least || len(args) > most {
			return fmt.Errorf("%s takes %s: see %s --help", cmd.CommandPath(), what, cmd.CommandPath())
		}
		return nil
	}
}

// OneID requires one argument, the ID of a row, and calls set with it.
func OneID(set func(id string) error) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != 1 {
			return fmt.Errorf("%s takes one ID: see %s --help", cmd.CommandPath(), cmd.CommandPath())
		}
		if args[0] == "" || len(args[0]) > 1024 || !utf8.ValidString(args[0]) || strings.ContainsRune(args[0], 0) {
			return errors.New("ID: want 1 to 1024 bytes of UTF-8")
		}
		if err := set(args[0]); err != nil {
			return fmt.Errorf("%s: %w", Shown(args[0]), err)
		}
		return nil
	}
}

// OptionalID is OneID of a command that can also choose rows by flags.
func OptionalID(set func(id string) error) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		return OneID(set)(cmd, args)
	}
}
