package cli

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/internal/bounds"
)

// option is the value of a flag. It stays text until all sources have been read, so that all
// problems are reported at once, each with the name of its source.
type option struct {
	text  string
	kind  string // what the help shows as the type
	parse func(text string) error
}

func (o *option) String() string        { return o.text }
func (o *option) Set(text string) error { o.text = text; return nil }
func (o *option) Type() string          { return o.kind }

// AddOption adds a flag whose text parse reads once flags and environment are known. Its error says
// what is wanted, and not the value. kind is what the help shows as the type. parse is not called
// for an empty default.
func AddOption(flags *pflag.FlagSet, name, kind, standard, usage string, parse func(string) error) {
	flags.Var(&option{text: standard, kind: kind, parse: parse}, name, usage)
}

// AddDuration adds a flag from lowest to highest. The help shows the bounds.
func AddDuration(flags *pflag.FlagSet, target *time.Duration, name string, standard, lowest, highest time.Duration, usage string) {
	want := human.Exact(lowest) + " to " + human.Exact(highest)
	*target = standard
	AddOption(flags, name, "duration", human.Exact(standard), usage+" ("+want+")", func(text string) error {
		d, err := time.ParseDuration(text)
		if err != nil || d < lowest || d > highest {
			return fmt.Errorf("want a duration such as %s, %s", human.Exact(standard), want)
		}
		*target = d
		return nil
	})
}

// AddRange adds a flag with the default and the bounds that the library has for the same setting.
func AddRange(flags *pflag.FlagSet, target *time.Duration, name string, r bounds.Range, usage string) {
	AddDuration(flags, target, name, r.Default, r.Min, r.Max, usage)
}

// AddInt adds a flag from lowest to highest. The help shows the bounds.
func AddInt(flags *pflag.FlagSet, target *int, name string, standard, lowest, highest int, usage string) {
	AddOption(flags, name, "int", strconv.Itoa(standard), fmt.Sprintf("%s (%d to %d)", usage, lowest, highest), func(text string) error {
		n, err := strconv.Atoi(text)
		if err != nil || n < lowest || n > highest {
			return fmt.Errorf("want a number, %d to %d", lowest, highest)
		}
		*target = n
		return nil
	})
}

// AddChoice adds a flag that has one of the choices. The help shows them.
func AddChoice(flags *pflag.FlagSet, target *string, name string, choices []string, standard, usage string) {
	addChoice(flags, name, choices, standard, usage, func(text string) error { *target = text; return nil })
}

func addChoice(flags *pflag.FlagSet, name string, choices []string, standard, usage string, set func(string) error) {
	AddOption(flags, name, "string", standard, usage+" ("+strings.Join(choices, ", ")+")", func(text string) error {
		if !slices.Contains(choices, text) {
			return errors.New("want one of " + strings.Join(choices, ", "))
		}
		return set(text)
	})
}

// AddBool adds a flag that is false unless it is given, or set to true in the environment.
func AddBool(flags *pflag.FlagSet, target *bool, name, usage string) {
	AddOption(flags, name, "bool", "false", usage, func(text string) error {
		b, err := strconv.ParseBool(text)
		if err != nil {
			return errors.New("want true or false")
		}
		*target = b
		return nil
	})
	flags.Lookup(name).NoOptDefVal = "true"
}

// CommandLineOnly disables the environment variables of flags that choose what a command changes.
func CommandLineOnly(flags *pflag.FlagSet, names ...string) {
	for _, name := range names {
		f := flags.Lookup(name)
		f.Annotations = map[string][]string{annotationCommandLine: {}}
	}
}

// Shown quotes a value that the user gave, unless it may hold a secret: a database URL easily ends
// up in the wrong place.
func Shown(text string) string {
	lower := strings.ToLower(text)
	for _, hint := range []string{"://", "@", "pass", "pwd", "secret", "token", "auth", "="} {
		if strings.Contains(lower, hint) {
			return "(value not shown, it might hold a password)"
		}
	}
	return fmt.Sprintf("%.100q", text)
}

// AddText adds a flag of a text of at most bytesMax bytes that PostgreSQL can store: UTF-8 without
// a zero byte. It calls set with it.
func AddText(flags *pflag.FlagSet, name string, bytesMax int, usage string, set func(string) error) {
	AddOption(flags, name, "string", "", usage, func(text string) error {
		if len(text) > bytesMax || !utf8.ValidString(text) || strings.ContainsRune(text, 0) {
			return fmt.Errorf("want at most %d bytes of UTF-8", bytesMax)
		}
		return set(text)
	})
}

// Into returns a setter for AddText. The target stays nil unless the flag is given.
func Into(target **string) func(string) error {
	return func(text string) error {
		if text == "" { // as from a shell variable that is not set
			return errors.New("want a name")
		}
		*target = &text
		return nil
	}
}

// AddOneOf adds a flag that has one of the known texts. The target stays nil unless it is given.
func AddOneOf(flags *pflag.FlagSet, target **string, name, usage string, known []string) {
	addChoice(flags, name, known, "", usage, Into(target))
}

// AgeMax is far above the age of any stored row.
const AgeMax = 10 * 365 * 24 * time.Hour

// AddAge adds a flag of a duration up to AgeMax. The target stays nil unless it is given.
func AddAge(flags *pflag.FlagSet, target **time.Duration, name, usage string) {
	AddOption(flags, name, "duration", "", usage, func(text string) error {
		d, err := time.ParseDuration(text)
		if err != nil || d < 0 || d > AgeMax {
			return errors.New("want a duration such as 90s, 15m or 48h")
		}
		*target = &d
		return nil
	})
}

// AddJSON adds --json to a command that prints one object.
func (s *Settings) AddJSON(cmd *cobra.Command) {
	AddBool(cmd.Flags(), &s.JSON, "json", "print one JSON object")
}

// AddJSONLines adds --json to a command that prints a list.
func (s *Settings) AddJSONLines(cmd *cobra.Command) {
	AddBool(cmd.Flags(), &s.JSON, "json", "print one JSON object per line")
}

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
