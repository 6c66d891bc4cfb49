package main

import (
	"encoding/json"
	"io"
	"regexp"
	"strconv"
	"text/tabwriter"
)

// printJSON writes one object on one line.
func printJSON(w io.Writer, v any) error {
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	return encoder.Encode(v)
}

// printObjects writes one object a line.
func printObjects[T any](w io.Writer, all []T) error {
	for _, one := range all {
		if err := printJSON(w, one); err != nil {
			return err
		}
	}
	return nil
}

// plainName matches names that need no quotes.
var plainName = regexp.MustCompile(`^[A-Za-z0-9_.-]+$`)

// plain quotes a name that could garble a terminal or a table.
func plain(name string) string {
	if plainName.MatchString(name) {
		return name
	}
	return strconv.Quote(name)
}

// sayNone ends a list without entries, which is not an error. With --json it prints nothing.
func sayNone(out io.Writer, asJSON bool, text string) error {
	if asJSON {
		return nil
	}
	return say(out, "%s\n", text)
}

// printTable aligns columns that are separated by tabs.
func printTable(out io.Writer, text string) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	if _, err := io.WriteString(table, text); err != nil {
		return err
	}
	return table.Flush()
}
