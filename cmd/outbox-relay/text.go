package main

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// clip makes a text fit a column of a table: one line, printable, not longer than width.
func clip(text string, width int) string {
	text, _, more := strings.Cut(strings.TrimSpace(text), "\n")
	runes := []rune(printable(text))
	if more || len(runes) > width {
		return string(runes[:min(len(runes), width-1)]) + "…"
	}
	return string(runes)
}

// say writes a text that fill formats.
func say(w io.Writer, format string, args ...any) error {
	_, err := io.WriteString(w, fill(format, args...))
	return err
}

// add appends a text that fill formats.
func add(text *strings.Builder, format string, args ...any) { text.WriteString(fill(format, args...)) }

// fill is fmt.Sprintf for untrusted values: it escapes them, so that none ends a line or a column.
func fill(format string, args ...any) string {
	args = slices.Clone(args)
	for i, arg := range args {
		switch v := arg.(type) {
		case string:
			args[i] = printable(v)
		case error:
			args[i] = printable(v.Error())
		case fmt.Stringer:
			args[i] = printable(v.String())
		}
	}
	return fmt.Sprintf(format, args...)
}

// printable replaces characters that could garble a terminal with their Go escapes.
func printable(text string) string {
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

// block writes a text beside its name, or under it if it has several lines.
func block(text *strings.Builder, name, content string) {
	if strings.Contains(strings.TrimSpace(content), "\n") {
		add(text, "%s\n", name)
		indent(text, content)
		return
	}
	add(text, "%-10s %s\n", name, strings.TrimSpace(content))
}

func indent(text *strings.Builder, content string) {
	for line := range strings.SplitSeq(strings.TrimRight(content, "\n"), "\n") {
		add(text, "  %s\n", strings.ReplaceAll(line, "\t", "  "))
	}
}
