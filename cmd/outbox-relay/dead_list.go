package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/internal/dead"
)

func newDeadList(s *settings) *cobra.Command {
	var filter deadFilter
	var asJSON bool
	cmd := needs(&cobra.Command{
		Use:   "list",
		Short: "List dead rows, the newest first",
		Long: `List rows that Kafka did not take, the newest first, with what waits behind each and the totals by
reason. What is behind another row is listed with --state behind, or by its --id. With --relay only the
rows of that relay, else of all. With --json there is one object a line and nothing else. Exit status 1
if no row fits.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), statusMax)
			defer cancel()
			filter.settle(s, cmd)
			return s.withTables(ctx, false, func(ctx context.Context, conn *pgx.Conn) error {
				return s.deadList(ctx, conn, filter, asJSON, cmd.OutOrStdout())
			})
		},
	}, flagDatabaseURL)
	filter.add(cmd, parkedListMax)
	addJSON(cmd, &asJSON)
	return cmd
}

func (s *settings) deadList(ctx context.Context, conn *pgx.Conn, filter deadFilter, asJSON bool, out io.Writer) error {
	rows, err := dead.List(ctx, conn, s.schema, filter.Filter, filter.limit+1)
	if err != nil {
		return err
	}
	if len(rows) == 0 {
		return filter.nothing()
	}
	more := len(rows) > filter.limit
	rows = rows[:min(len(rows), filter.limit)]
	if asJSON {
		for _, r := range rows {
			if err := printJSON(out, r); err != nil {
				return err
			}
		}
		return nil
	}
	totals, err := dead.Totals(ctx, conn, s.schema, filter.Filter)
	if err != nil {
		return err
	}
	if err := printDead(out, rows); err != nil {
		return err
	}
	if more {
		if _, err := fmt.Fprintf(out, "the newest %d: --%s shows more\n", len(rows), flagLimit); err != nil {
			return err
		}
	}
	return printDeadTotals(out, totals)
}

func printDead(out io.Writer, rows []dead.Row) error {
	var text strings.Builder
	text.WriteString("seq\tid\ttopic\tkey\treason\tattempts\tage\tbehind it\terror\n")
	for _, r := range rows {
		reason := r.Reason
		if r.State == "retry" {
			reason += " (being retried)"
		}
		fmt.Fprintf(&text, "%d\t%s\t%s\t%s\t%s\t%d\t%s\t%d\t%s\n", r.Seq, r.ID, r.Topic, keyText(r.Key), reason, r.Attempts, seconds(r.AgeSeconds), r.Behind, clip(r.Error, errorWidth))
	}
	return printTable(out, text.String())
}

// printDeadTotals writes one line for each relay; the totals are sorted by it.
func printDeadTotals(out io.Writer, totals []dead.Total) error {
	var text strings.Builder
	for len(totals) > 0 {
		var reasons []string
		var count, keys, retrying int64
		name := totals[0].Relay
		for len(totals) > 0 && totals[0].Relay == name {
			t := totals[0]
			reasons = append(reasons, fmt.Sprintf("%s %d", t.Reason, t.Count))
			count, keys, retrying, totals = count+t.Count, keys+t.HeldKeys, retrying+t.Retrying, totals[1:]
		}
		fmt.Fprintf(&text, "relay %s: %d dead (%s), %d keys held, %d being retried\n", plain(name), count, strings.Join(reasons, ", "), keys, retrying)
	}
	_, err := io.WriteString(out, text.String())
	return err
}
