package command

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
)

// Execute runs a command line in this process, with an environment of its own.
func Execute(ctx context.Context, args []string, environment map[string]string, stdout, stderr io.Writer) int {
	lookup := func(name string) (string, bool) {
		value, found := environment[name]
		return value, found
	}
	return execute(ctx, args, lookup, stdout, stderr)
}

// CommandLine writes docs/cli.md from the commands themselves.
func CommandLine() string {
	root := newCommands()
	var text, run strings.Builder
	others := map[string]bool{}
	text.WriteString("# outbox-relay: the command line\n\n" +
		"`outbox-relay help COMMAND` has what a command does, loses or repeats, with examples, and all flags with\n" +
		"defaults and bounds. A test writes this file from the code.\n\n" +
		strings.TrimSpace(root.Long) + "\n\n## Flags of every command\n\n")
	var connection []string
	shownFlags(root, func(name, line string) {
		if cli.ConnectionFlags().Lookup(name) != nil {
			connection = append(connection, "`--"+name+"`")
			return
		}
		text.WriteString(line)
	})
	text.WriteString("\n`outbox-relay help connection` has those of TLS, passwords and tokens: " + strings.Join(connection, " ") + "\n")
	text.WriteString("\n## Commands\n\n| Command | |\n|---|---|\n")
	var add func(c *cobra.Command)
	add = func(c *cobra.Command) {
		if c.Hidden || c.Name() == "completion" {
			return
		}
		if c.HasParent() && !c.HasSubCommands() {
			shownFlags(c, func(name, line string) {
				if c.Name() == "run" {
					run.WriteString(line)
				} else {
					others["`--"+name+"`"] = true
				}
			})
			fmt.Fprintf(&text, "| `%s` | %s |\n", shortPath(c), c.Short)
		}
		for _, sub := range c.Commands() {
			add(sub)
		}
	}
	add(root)
	return text.String() + "\n## Flags of run\n\n" + run.String() + "\n## Flags of other commands\n\n" +
		strings.Join(slices.Sorted(maps.Keys(others)), " ") + "\n"
}

// Helps returns the long text and the examples of each command by its name.
func Helps() map[string]string {
	texts := map[string]string{}
	var add func(c *cobra.Command)
	add = func(c *cobra.Command) {
		if c.Name() != "completion" { // cobra's own texts
			texts[c.CommandPath()] = c.Long + "\n" + c.Example
			for _, sub := range c.Commands() {
				add(sub)
			}
		}
	}
	add(newCommands())
	return texts
}

func newCommands() *cobra.Command {
	return newRoot(cli.NewSettings(nil), io.Discard, io.Discard)
}

// shownFlags calls each with the name and the line of each flag of a command.
func shownFlags(c *cobra.Command, each func(name, line string)) {
	c.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		kind, usage := pflag.UnquoteUsage(f)
		standard := ""
		if f.DefValue != "" && f.DefValue != "false" && f.DefValue != "[]" {
			standard = " = `" + f.DefValue + "`"
		}
		each(f.Name, fmt.Sprintf("- `%s`%s: %s\n", strings.TrimSpace("--"+f.Name+" "+kind), standard, usage))
	})
}

func shortPath(c *cobra.Command) string {
	return strings.TrimPrefix(c.CommandPath(), "outbox-relay ")
}

// CheckCommandLine fails for a command or a flag that is not there.
func CheckCommandLine(args []string) error {
	command, rest, err := newCommands().Find(args)
	if err != nil {
		return err
	}
	return command.ParseFlags(rest)
}
