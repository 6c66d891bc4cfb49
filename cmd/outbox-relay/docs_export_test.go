package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// CommandLine writes docs/cli.md from the commands themselves.
func CommandLine() string {
	s := &settings{checks: map[*cobra.Command]func() error{}}
	root := newRoot(s, io.Discard, io.Discard)
	var text strings.Builder
	text.WriteString("# outbox-relay: the command line\n\n" +
		"Written from the code: `go test ./cmd/outbox-relay -run TestCommandLineIsDocumented -update`.\n")
	document(&text, root)
	return text.String()
}

func document(text *strings.Builder, c *cobra.Command) {
	if c.Hidden {
		return
	}
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
	c.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		kind, usage := pflag.UnquoteUsage(f)
		standard := ""
		if f.DefValue != "" && f.DefValue != "false" {
			standard = "`" + f.DefValue + "`"
		}
		fmt.Fprintf(&flags, "| `%s` | %s | %s |\n", strings.TrimSpace("--"+f.Name+" "+kind), standard, strings.ReplaceAll(usage, "|", "\\|"))
	})
	if flags.Len() > 0 {
		title := "Flag"
		if !c.HasParent() {
			title = "Flag of every command"
		}
		fmt.Fprintf(text, "\n| %s | Default | |\n|---|---|---|\n%s", title, flags.String())
	}
	for _, sub := range c.Commands() {
		document(text, sub)
	}
}

// unindent takes the margin away that examples and cobra's own texts have.
func unindent(example string) string {
	var lines []string
	for line := range strings.SplitSeq(strings.Trim(example, "\n"), "\n") {
		lines = append(lines, strings.TrimRight(strings.TrimPrefix(strings.ReplaceAll(line, "\t", "  "), "  "), " "))
	}
	return strings.Join(lines, "\n")
}
