package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
)

// severalMin is how many commands have the same flag for it to be described once for all of them.
const severalMin = 4

// CommandLine writes docs/cli.md from the commands themselves.
func CommandLine() string {
	root := newRoot(cli.NewSettings(nil), io.Discard, io.Discard)
	w := cliWriter{commands: map[string]int{}}
	w.count(root)
	w.text.WriteString("# outbox-relay: the command line\n\n" +
		"Which commands and flags there are, and what they do. Written from the code: `go test ./cmd/outbox-relay -run TestCommandLineIsDocumented -update`.\n")
	w.document(root)
	w.text.WriteString("\n## Flags of several commands\n\n| Flag | Default | |\n|---|---|---|\n")
	for _, line := range slices.Sorted(maps.Keys(w.commands)) {
		if w.commands[line] >= severalMin {
			w.text.WriteString(line)
		}
	}
	return w.text.String()
}

// cliWriter describes commands. commands counts by a flag's line the commands that have it.
type cliWriter struct {
	text     strings.Builder
	commands map[string]int
}

func (w *cliWriter) count(c *cobra.Command) {
	if c.HasParent() && !c.Hidden {
		shownFlags(c, func(_, line string) { w.commands[line]++ })
	}
	for _, sub := range c.Commands() {
		w.count(sub)
	}
}

func (w *cliWriter) document(c *cobra.Command) {
	if c.Hidden {
		return
	}
	text := &w.text
	if c.HasParent() {
		fmt.Fprintf(text, "\n## %s\n\n%s.\n", strings.TrimPrefix(c.CommandPath(), "outbox-relay "), c.Short)
	}
	if c.Long != "" && c.Parent() != nil && c.Parent().Name() == "completion" {
		fmt.Fprintf(text, "\n```\n%s\n```\n", unindent(c.Long))
	} else if c.Long != "" {
		fmt.Fprintf(text, "\n```\n%s\n```\n", strings.TrimSpace(c.Long))
	}
	if c.Example != "" {
		fmt.Fprintf(text, "\n```sh\n%s\n```\n", unindent(c.Example))
	}
	var flags strings.Builder
	var several []string
	shownFlags(c, func(name, line string) {
		if w.commands[line] >= severalMin {
			several = append(several, "`--"+name+"`")
		} else {
			flags.WriteString(line)
		}
	})
	if flags.Len() > 0 {
		title := "Flag"
		if !c.HasParent() {
			title = "Flag of every command"
		}
		fmt.Fprintf(text, "\n| %s | Default | |\n|---|---|---|\n%s", title, flags.String())
	}
	if len(several) > 0 {
		fmt.Fprintf(text, "\n[As elsewhere](#flags-of-several-commands): %s.\n", strings.Join(several, ", "))
	}
	for _, sub := range c.Commands() {
		w.document(sub)
	}
}

// shownFlags calls each with the name and the table's line of each flag of a command.
func shownFlags(c *cobra.Command, each func(name, line string)) {
	c.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		kind, usage := pflag.UnquoteUsage(f)
		standard := ""
		if f.DefValue != "" && f.DefValue != "false" {
			standard = "`" + f.DefValue + "`"
		}
		each(f.Name, fmt.Sprintf("| `%s` | %s | %s |\n", strings.TrimSpace("--"+f.Name+" "+kind), standard, strings.ReplaceAll(usage, "|", "\\|")))
	})
}

// unindent takes the margin away that examples and cobra's own texts have.
func unindent(example string) string {
	var lines []string
	for line := range strings.SplitSeq(strings.Trim(example, "\n"), "\n") {
		lines = append(lines, strings.TrimRight(strings.TrimPrefix(strings.ReplaceAll(line, "\t", "  "), "  "), " "))
	}
	return strings.Join(lines, "\n")
}

// CheckCommandLine fails for a command or a flag that is not there.
func CheckCommandLine(args []string) error {
	root := newRoot(cli.NewSettings(nil), io.Discard, io.Discard)
	command, rest, err := root.Find(args)
	if err != nil {
		return err
	}
	return command.ParseFlags(rest)
}
