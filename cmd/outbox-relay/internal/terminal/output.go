package terminal

import (
	"encoding/json"
	"io"
	"regexp"
	"strconv"
	"strings"
	"text/tabwriter"
)

// PrintJSON writes one value as JSON on one line, without escaping HTML.
func PrintJSON(w io.Writer, v any) error {
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	return encoder.Encode(v)
}

// PrintObjects writes each value as PrintJSON does.
func PrintObjects[T any](w io.Writer, all []T) error {
	for _, one := range all {
		if err := PrintJSON(w, one); err != nil {
			return err
		}
	}
	return nil
}

// plainName matches names that need no quotes.
var plainName = regexp.MustCompile(`^[A-Za-z0-9_.-]+$`)

// Plain quotes a name that could garble a terminal or a table. Other names stay as they are.
func Plain(name string) string {
	if plainName.MatchString(name) {
		return name
	}
	return strconv.Quote(name)
}

// Table aligns columns that are separated by tabs.
func Table(text string) string {
	var aligned strings.Builder
	table := tabwriter.NewWriter(&aligned, 0, 0, 2, ' ', 0)
	_, _ = io.WriteString(table, text) // a strings.Builder never fails
	_ = table.Flush()
	return aligned.String()
}
