package terminal

import (
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"unicode"
)

// Clip makes a text fit a column of a table: one line, printable, not longer than width.
func Clip(text string, width int) string {
	text, _, more := strings.Cut(strings.TrimSpace(text), "\n")
	runes := []rune(Printable(text))
	if more || len(runes) > width {
		return string(runes[:min(len(runes), width-1)]) + "…"
	}
	return string(runes)
}

// Line makes a text one line, without cutting it.
func Line(text string) string {
	return Printable(strings.ReplaceAll(strings.TrimSpace(text), "\n", "; "))
}

// Say writes a text that Fill formats.
func Say(w io.Writer, format string, args ...any) error { return Write(w, Fill(format, args...)) }

// Write writes a text as it is.
func Write(w io.Writer, text string) error {
	_, err := io.WriteString(w, text)
	return err
}

// Add appends a text that Fill formats.
func Add(text *strings.Builder, format string, args ...any) { text.WriteString(Fill(format, args...)) }

// Fill is fmt.Sprintf for untrusted values: it escapes strings, errors and Stringers, so that none
// ends a line or a column. The format itself may contain both.
func Fill(format string, args ...any) string {
	args = slices.Clone(args)
	for i, arg := range args {
		switch v := arg.(type) {
		case string:
			args[i] = Printable(v)
		case error:
			args[i] = Printable(v.Error())
		case fmt.Stringer:
			args[i] = Printable(v.String())
		}
	}
	return fmt.Sprintf(format, args...)
}

// Printable replaces characters that could garble a terminal with their Go escapes.
func Printable(text string) string {
	var b strings.Builder
	for _, r := range text {
		if unicode.IsPrint(r) {
			b.WriteRune(r)
		} else {
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		}
	}
	return b.String()
}

// Block writes a text beside its name, or under it if it has several lines.
func Block(text *strings.Builder, name, content string) {
	if strings.Contains(strings.TrimSpace(content), "\n") {
		Add(text, "%s\n", name)
		Indent(text, content)
		return
	}
	Add(text, "%-10s %s\n", name, strings.TrimSpace(content))
}

// Indent writes a text of several lines, each behind two spaces. It escapes them.
func Indent(text *strings.Builder, content string) {
	for line := range strings.SplitSeq(strings.TrimRight(content, "\n"), "\n") {
		Add(text, "  %s\n", strings.ReplaceAll(line, "\t", "  "))
	}
}

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
