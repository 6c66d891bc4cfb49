package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// parkedListMax is the default limit of a list.
const parkedListMax = 50

// newList makes cmd list rows.
func newList[P, R any](s *cli.Settings, w waiting[P, R], cmd *cobra.Command) *cobra.Command {
	var limit int
	var asJSON bool
	w.add(cmd.Flags())
	addLimit(cmd.Flags(), &limit, parkedListMax, w.words())
	cli.AddJSONLines(cmd, &asJSON)
	cmd.Args = cli.NoArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return read(cmd, s, w, func(ctx context.Context, conn *pgx.Conn) error {
			return list(ctx, conn, w, limit, asJSON, cmd.OutOrStdout())
		})
	}
	return cli.Needs(cmd, cli.FlagDatabaseURL)
}

// read runs work with a connection, after resolving the choice of rows.
func read(cmd *cobra.Command, s *cli.Settings, choice chooser, work func(context.Context, *pgx.Conn) error) error {
	ctx, cancel := context.WithTimeout(cmd.Context(), statusMax)
	defer cancel()
	return s.WithTables(ctx, false, func(ctx context.Context, conn *pgx.Conn) error {
		if err := choice.resolve(ctx, conn, cmd.Flags()); err != nil {
			return err
		}
		return work(ctx, conn)
	})
}

func list[P, R any](ctx context.Context, conn *pgx.Conn, w waiting[P, R], limit int, asJSON bool, out io.Writer) error {
	rows, err := w.list(ctx, conn, limit+1)
	if err != nil {
		return err
	}
	if len(rows) == 0 {
		return terminal.SayNone(out, asJSON, w.nothing())
	}
	more := len(rows) > limit
	rows = rows[:min(len(rows), limit)]
	if asJSON {
		for _, r := range rows {
			if err := terminal.PrintJSON(out, r); err != nil {
				return err
			}
		}
		return nil
	}
	totals, err := w.totals(ctx, conn)
	if err != nil {
		return err
	}
	if err := w.print(out, rows); err != nil {
		return err
	}
	if more {
		totals = terminal.Fill("the newest %d: --%s shows more\n", len(rows), flagLimit) + totals
	}
	_, err = io.WriteString(out, totals)
	return err
}

// total is how many rows of one relay or consumer wait for a reason.
type total struct {
	of, reason            string
	count, retrying, keys int64
}

// totalsText is one line per relay or consumer. The totals are sorted by it.
func totalsText(totals []total, what string) string {
	var text strings.Builder
	for len(totals) > 0 {
		var reasons []string
		var count, keys, retrying int64
		of := totals[0].of
		for len(totals) > 0 && totals[0].of == of {
			t := totals[0]
			reasons = append(reasons, fmt.Sprintf("%s %d", t.reason, t.count))
			count, keys, retrying, totals = count+t.count, keys+t.keys, retrying+t.retrying, totals[1:]
		}
		terminal.Add(&text, "%s: %d %s (%s), %s held, %d being retried\n", of, count, what, strings.Join(reasons, ", "), human.Count(keys, "key"), retrying)
	}
	return text.String()
}
