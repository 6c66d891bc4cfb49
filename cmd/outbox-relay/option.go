package main

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

func addOption(flags *pflag.FlagSet, name, kind, standard, usage string, parse func(string) error) {
	flags.Var(&option{text: standard, kind: kind, parse: parse}, name, usage)
}

// addDuration adds a flag with bounds. The help shows them.
func addDuration(flags *pflag.FlagSet, target *time.Duration, name string, standard, lowest, highest time.Duration, usage string) {
	bounds := short(lowest) + " to " + short(highest)
	*target = standard
	addOption(flags, name, "duration", short(standard), usage+" ("+bounds+")", func(text string) error {
		d, err := time.ParseDuration(text)
		if err != nil || d < lowest || d > highest {
			return fmt.Errorf("want a duration such as %s, %s", short(standard), bounds)
		}
		*target = d
		return nil
	})
}

func addInt(flags *pflag.FlagSet, target *int, name string, standard, lowest, highest int, usage string) {
	addOption(flags, name, "int", strconv.Itoa(standard), fmt.Sprintf("%s (%d to %d)", usage, lowest, highest), func(text string) error {
		n, err := strconv.Atoi(text)
		if err != nil || n < lowest || n > highest {
			return fmt.Errorf("want a number, %d to %d", lowest, highest)
		}
		*target = n
		return nil
	})
}

func addChoice(flags *pflag.FlagSet, target *string, name string, choices []string, standard, usage string) {
	addOption(flags, name, "string", standard, usage+" ("+strings.Join(choices, ", ")+")", func(text string) error {
		if !slices.Contains(choices, text) {
			return errors.New("want one of " + strings.Join(choices, ", "))
		}
		*target = text
		return nil
	})
}

func addBool(flags *pflag.FlagSet, target *bool, name, usage string) {
	addOption(flags, name, "bool", "false", usage, func(text string) error {
		b, err := strconv.ParseBool(text)
		if err != nil {
			return errors.New("want true or false")
		}
		*target = b
		return nil
	})
	flags.Lookup(name).NoOptDefVal = "true"
}

// commandLineOnly disables the environment variables of flags that decide what is lost.
func commandLineOnly(flags *pflag.FlagSet, names ...string) {
	for _, name := range names {
		f := flags.Lookup(name)
		f.Annotations = map[string][]string{annotationCommandLine: {}}
	}
}

// short writes a duration without its zero units: 10m, not 10m0s.
func short(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// shown quotes a value that the user gave, unless it may hold a secret: a database URL easily ends
// up in the wrong place.
func shown(text string) string {
	lower := strings.ToLower(text)
	for _, hint := range []string{"://", "@", "pass", "pwd", "secret", "="} {
		if strings.Contains(lower, hint) {
			return "(value not shown, it might hold a password)"
		}
	}
	return fmt.Sprintf("%.100q", text)
}

// addText adds a flag of a text that PostgreSQL can store.
func addText(flags *pflag.FlagSet, name string, bytesMax int, usage string, set func(string) error) {
	addOption(flags, name, "string", "", usage, func(text string) error {
		if len(text) > bytesMax || !utf8.ValidString(text) || strings.ContainsRune(text, 0) {
			return fmt.Errorf("want at most %d bytes of UTF-8", bytesMax)
		}
		return set(text)
	})
}

// into returns a setter for a text flag.
func into(target **string) func(string) error {
	return func(text string) error { *target = &text; return nil }
}

// addOneOf adds a flag of a text that filters only if it is given.
func addOneOf(flags *pflag.FlagSet, target **string, name, usage string, known []string) {
	addOption(flags, name, "string", "", usage+" ("+strings.Join(known, ", ")+")", func(text string) error {
		if !slices.Contains(known, text) {
			return errors.New("want one of " + strings.Join(known, ", "))
		}
		return into(target)(text)
	})
}

// ageMax is far above the age of any stored row.
const ageMax = 10 * 365 * 24 * time.Hour

// addAge adds a flag of a duration that filters only if it is given.
func addAge(flags *pflag.FlagSet, target **time.Duration, name, usage string) {
	addOption(flags, name, "duration", "", usage, func(text string) error {
		d, err := time.ParseDuration(text)
		if err != nil || d < 0 || d > ageMax {
			return errors.New("want a duration such as 90s, 15m or 48h")
		}
		*target = &d
		return nil
	})
}

func addJSON(cmd *cobra.Command, target *bool) {
	addBool(cmd.Flags(), target, "json", "print one JSON object")
}

// addJSONLines is addJSON for lists.
func addJSONLines(cmd *cobra.Command, target *bool) {
	addBool(cmd.Flags(), target, "json", "print one JSON object per line")
}
