package main

import (
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
)

// severalMin is how many commands have the same flag for it to be described once for all of them.
const severalMin = 2

// namedMax is how many commands are named beside one of several meanings of a flag.
const namedMax = 8

// CommandLine writes docs/cli.md from the commands themselves: what each is for, what its help warns
// of, its exit status and its flags. The rest of a help text is only in the help.
func CommandLine() string {
	root := newCommands()
	w := cliWriter{uses: map[string]map[string][]string{}}
	w.count(root)
	w.text.WriteString("# outbox-relay: the command line\n\n" +
		"The commands: what each does, loses or repeats, its exit status, and its flags with defaults and bounds.\n" +
		"`outbox-relay help COMMAND` prints more, with examples. Written from the code:\n" +
		"`go test ./cmd/outbox-relay -run TestCommandLineIsDocumented -update`.\n\n" +
		strings.TrimSpace(root.Long) + "\n\n## Flags of every command\n\n")
	shownFlags(root, func(_, line string) { w.text.WriteString(line) })
	w.several()
	for _, sub := range root.Commands() {
		w.document(sub)
	}
	return w.text.String()
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

// cliWriter describes commands. uses has the names of the commands that have a flag, by the flag's
// name and line.
type cliWriter struct {
	text strings.Builder
	uses map[string]map[string][]string
}

func (w *cliWriter) count(c *cobra.Command) {
	if c.HasParent() && !c.Hidden {
		shownFlags(c, func(name, line string) {
			if w.uses[name] == nil {
				w.uses[name] = map[string][]string{}
			}
			w.uses[name][line] = append(w.uses[name][line], shortPath(c))
		})
	}
	for _, sub := range c.Commands() {
		w.count(sub)
	}
}

// several describes the flags that several commands share. Where a name has several meanings, rarer
// ones name their commands.
func (w *cliWriter) several() {
	w.text.WriteString("\n## Flags of several commands\n\nEach command names those that it has (\"Also\").\n\n")
	for _, name := range sortedKeys(w.uses) {
		var shared []string
		for _, line := range sortedKeys(w.uses[name]) {
			if len(w.uses[name][line]) >= severalMin {
				shared = append(shared, line)
			}
		}
		for _, line := range shared {
			if commands := w.uses[name][line]; len(shared) > 1 && len(commands) <= namedMax {
				line = strings.TrimSuffix(line, "\n") + " (" + strings.Join(commands, ", ") + ")\n"
			}
			w.text.WriteString(line)
		}
	}
}

func (w *cliWriter) document(c *cobra.Command) {
	if c.Hidden {
		return
	}
	texts := warnings(c)
	if len(texts) == 0 || !strings.HasPrefix(texts[0], c.Short) {
		texts = slices.Insert(texts, 0, c.Short+".")
	}
	var own strings.Builder
	var shared []string
	shownFlags(c, func(name, line string) {
		if len(w.uses[name][line]) >= severalMin {
			shared = append(shared, "--"+name)
		} else {
			own.WriteString(line)
		}
	})
	if !c.HasSubCommands() || len(texts) > 1 { // else the commands below say it
		fmt.Fprintf(&w.text, "\n## %s\n\n%s\n", shortPath(c), strings.Join(texts, "\n\n"))
	}
	if len(shared) > 0 {
		fmt.Fprintf(&w.text, "\nAlso: `%s`\n", strings.Join(shared, " "))
	}
	if own.Len() > 0 {
		w.text.WriteString("\n" + own.String())
	}
	for _, sub := range c.Commands() {
		w.document(sub)
	}
}

// warns finds what a reader has to know before the command runs, and what its exit status says.
var warns = regexp.MustCompile(`\b(?:lost|lose|loss|twice|second time|(?:executed|made|run|handled|effect|last rows) again|` +
	`not published|never (?:published|handled|for)|SKIPS|REPEATS|refuses a role|not limited|any topic|stored anyway|by hand|take effect|unencrypted|Effects|use a new topic|retention|same keys|[Ee]xit status)\b`)

// sentence is one of a help text, whose lines were joined.
var sentence = regexp.MustCompile(`[^.]*(?:\.[^ .][^.]*|\.\.\.[^.]*)*\.(?: |$)`)

// warnings returns, of each paragraph of a command's help that warns of something, the sentences
// from the first to the last warning.
func warnings(c *cobra.Command) (found []string) {
	if c.Parent().Name() == "completion" || c.Parent().Name() == "bench" || c.Name() == "demo" {
		return nil // they touch no data of others
	}
	for paragraph := range strings.SplitSeq(strings.TrimSpace(c.Long), "\n\n") {
		sentences := sentence.FindAllString(strings.Join(strings.Fields(paragraph), " "), -1)
		first, last := slices.IndexFunc(sentences, warns.MatchString), -1
		if first < 0 || strings.HasPrefix(paragraph, "  ") {
			continue
		}
		for i, s := range sentences {
			if warns.MatchString(s) {
				last = i
			}
		}
		if first > 0 && refersBack.MatchString(sentences[first]) {
			first--
		}
		found = append(found, wrap(strings.TrimSpace(strings.Join(sentences[first:last+1], ""))))
	}
	return found
}

// refersBack finds sentences that need the one before.
var refersBack = regexp.MustCompile(`^(?:They|Their|It|The pause|That|Then) `)

// wrap breaks lines before column 100.
func wrap(text string) string {
	var lines []string
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && len(line)+1+len(word) > 100 {
			lines, line = append(lines, line), ""
		}
		line = strings.TrimSpace(line + " " + word)
	}
	return strings.Join(append(lines, line), "\n")
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
