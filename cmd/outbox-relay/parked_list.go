package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/internal/parked"
)

const parkedListMax = 50

func newParkedList(s *settings) *cobra.Command {
	var filter parkedFilter
	var asJSON bool
	cmd := needs(&cobra.Command{
		Use:   "list",
		Short: "List parked messages, the newest first",
		Long: `List parked messages, the newest first, with what waits behind each and the totals by reason. What is
behind another message is listed with --reason behind, or by its --id. With --json there is one object
a line and nothing else. Exit status 1 if no message fits.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), statusMax)
			defer cancel()
			return s.withTables(ctx, false, func(ctx context.Context, conn *pgx.Conn) error {
				return s.parkedList(ctx, conn, filter, asJSON, cmd.OutOrStdout())
			})
		},
	}, flagDatabaseURL)
	filter.add(cmd, parkedListMax)
	addJSON(cmd, &asJSON)
	return cmd
}

func (s *settings) parkedList(ctx context.Context, conn *pgx.Conn, filter parkedFilter, asJSON bool, out io.Writer) error {
	if err := filter.find(ctx, conn, s.schema); err != nil {
		return err
	}
	messages, err := parked.List(ctx, conn, s.schema, filter.Filter, filter.limit+1)
	if err != nil {
		return err
	}
	if len(messages) == 0 {
		return filter.nothing()
	}
	more := len(messages) > filter.limit
	messages = messages[:min(len(messages), filter.limit)]
	if asJSON {
		for _, m := range messages {
			if err := printJSON(out, m); err != nil {
				return err
			}
		}
		return nil
	}
	totals, err := parked.Totals(ctx, conn, s.schema, filter.Filter)
	if err != nil {
		return err
	}
	if err := printParked(out, messages); err != nil {
		return err
	}
	if more {
		if _, err := fmt.Fprintf(out, "the newest %d: --%s shows more\n", len(messages), flagLimit); err != nil {
			return err
		}
	}
	return printTotals(out, totals)
}

// What is shown of a text in a column.
const (
	keyWidth   = 32
	errorWidth = 72
)

func printParked(out io.Writer, messages []parked.Message) error {
	var text strings.Builder
	text.WriteString("id\ttopic/partition/offset\tkey\treason\tattempts\tage\tbehind it\terror\n")
	for _, m := range messages {
		fmt.Fprintf(&text, "%s\t%s\t%s\t%s\t%d\t%s\t%d\t%s\n", m.ID, m.At(), keyText(m.Key), stateText(&m), m.Attempts, seconds(m.AgeSeconds), m.Behind, clip(m.Error, errorWidth))
	}
	return printTable(out, text.String())
}

func keyText(key parked.Key) string {
	if key == nil {
		return "-"
	}
	if len(key) == 0 {
		return `""`
	}
	return clip(key.String(), keyWidth)
}

// stateText is the reason, and what is being done about it.
func stateText(m *parked.Message) string {
	switch {
	case m.State == "retry" && m.RetryInSeconds != nil && *m.RetryInSeconds > 0:
		return m.Reason + " (retried in " + seconds(*m.RetryInSeconds) + ")"
	case m.State == "retry":
		return m.Reason + " (being retried)"
	case m.State == "behind" && m.Reason != "behind":
		return m.Reason + " (behind)"
	}
	return m.Reason
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

// printTotals writes one line for each consumer; the totals are sorted by it.
func printTotals(out io.Writer, totals []parked.Total) error {
	var text strings.Builder
	for len(totals) > 0 {
		var reasons []string
		var count, keys, retrying int64
		name := totals[0].Consumer
		for len(totals) > 0 && totals[0].Consumer == name {
			t := totals[0]
			reasons = append(reasons, fmt.Sprintf("%s %d", t.Reason, t.Count))
			count, keys, retrying, totals = count+t.Count, keys+t.HeldKeys, retrying+t.Retrying, totals[1:]
		}
		fmt.Fprintf(&text, "%s: %d parked (%s), %d keys held, %d being retried\n", consumerText(name), count, strings.Join(reasons, ", "), keys, retrying)
	}
	_, err := io.WriteString(out, text.String())
	return err
}

// consumerText quotes a name that is no plain group/topic.
func consumerText(name string) string {
	if plainName.MatchString(strings.ReplaceAll(name, "/", ".")) {
		return name
	}
	return strconv.Quote(name)
}
