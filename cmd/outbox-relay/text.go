package main

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"

	"github.com/effectonce/effectonce/internal/parked"
)

// What is shown of a text in a column.
const (
	keyWidth   = 32
	errorWidth = 72
	// kafkaErrorWidth is more: the commands that end a hanging transaction are in it.
	kafkaErrorWidth = 1000
)

func keyText(key parked.Key) string {
	if key == nil {
		return "-"
	}
	if len(key) == 0 {
		return `""`
	}
	return clip(key.String(), keyWidth)
}

// clip makes a text fit a column of a table: one line, printable, not longer than width.
func clip(text string, width int) string {
	text, _, more := strings.Cut(strings.TrimSpace(text), "\n")
	runes := []rune(printable(text))
	if more || len(runes) > width {
		return string(runes[:min(len(runes), width-1)]) + "…"
	}
	return string(runes)
}

// printable writes what would upset a terminal as its Go escape.
func printable(text string) string {
	if parked.Printable(text) {
		return text
	}
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

func fullKey(key parked.Key) string {
	switch {
	case key == nil:
		return "none: nothing waits for it"
	case len(key) == 0:
		return `""`
	}
	return key.String()
}

// block writes a text beside its name, or under it if it has several lines.
func block(text *strings.Builder, name, content string) {
	if strings.Contains(strings.TrimSpace(content), "\n") {
		fmt.Fprintln(text, name)
		indent(text, content)
		return
	}
	fmt.Fprintf(text, "%-10s %s\n", name, printable(strings.TrimSpace(content)))
}

func indent(text *strings.Builder, content string) {
	for line := range strings.SplitSeq(strings.TrimRight(content, "\n"), "\n") {
		fmt.Fprintf(text, "  %s\n", printable(strings.ReplaceAll(line, "\t", "  ")))
	}
}
