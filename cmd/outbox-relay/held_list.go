package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/held"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// listMax is the default limit of a list.
const listMax = 50

// newList makes cmd list rows.
func newList(s *cli.Settings, kind held.Kind, cmd *cobra.Command) *cobra.Command {
	var asJSON bool
	c := newSelection(s, kind)
	c.add(cmd.Flags(), listMax)
	cli.AddJSONLines(cmd, &asJSON)
	cmd.Args = cli.NoArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), statusMax)
		defer cancel()
		return c.with(ctx, cmd.Flags(), false, func(ctx context.Context, conn *pgx.Conn) error {
			return c.list(ctx, conn, asJSON, cmd.OutOrStdout())
		})
	}
	return cli.Needs(cmd, cli.FlagDatabaseURL)
}

func (c *selection) list(ctx context.Context, conn *pgx.Conn, asJSON bool, out io.Writer) error {
	rows, err := c.kind.List(ctx, conn, c.s.Schema, c.filter, c.limit+1)
	if err != nil {
		return err
	}
	if len(rows) == 0 {
		return terminal.SayNone(out, asJSON, c.nothing())
	}
	more := len(rows) > c.limit
	rows = rows[:min(len(rows), c.limit)]
	if asJSON {
		return terminal.PrintObjects(out, rows)
	}
	totals, err := c.kind.Totals(ctx, conn, c.s.Schema, c.filter)
	if err != nil {
		return err
	}
	if err := c.print(out, rows); err != nil {
		return err
	}
	if more {
		err = terminal.Say(out, "the newest %d: --%s shows more\n", len(rows), flagLimit)
	}
	if err == nil {
		_, err = io.WriteString(out, c.totalsText(totals))
	}
	return err
}

// print writes a table of rows.
func (c *selection) print(out io.Writer, rows []held.Row) error {
	var text strings.Builder
	place := "seq\tid\ttopic"
	if c.kind == held.Parked {
		place = "id\ttopic/partition/offset"
	}
	text.WriteString(place + "\tkey\treason\tattempts\tage\tbehind it\terror\n")
	for _, r := range rows {
		if c.kind == held.Dead {
			terminal.Add(&text, "%d\t%s\t%s", r.Seq, r.ID, r.Topic)
		} else {
			terminal.Add(&text, "%s\t%s", r.ID, r.At())
		}
		terminal.Add(&text, "\t%s\t%s\t%d\t%s\t%d\t%s\n", keyText(r.Key), stateText(&r), r.Attempts, seconds(r.AgeSeconds), r.Behind, terminal.Clip(r.Error, errorWidth))
	}
	return terminal.PrintTable(out, text.String())
}

// stateText is the reason, and the progress of a retry.
func stateText(r *held.Row) string {
	switch {
	case r.State == "retry" && r.RetryInSeconds != nil && *r.RetryInSeconds > 0:
		return r.Reason + " (retried in " + seconds(*r.RetryInSeconds) + ")"
	case r.State == "retry":
		return r.Reason + " (being retried)"
	case r.State == "behind" && r.Reason != "behind":
		return r.Reason + " (behind)"
	}
	return r.Reason
}

// consumerText quotes a name that is no plain group/topic.
func consumerText(name string) string {
	if dotted := strings.ReplaceAll(name, "/", "."); terminal.Plain(dotted) == dotted {
		return name
	}
	return strconv.Quote(name)
}

// totalsText is one line per relay or consumer. The totals are sorted by it.
func (c *selection) totalsText(totals []held.Total) string {
	var text strings.Builder
	for len(totals) > 0 {
		var reasons []string
		var count, keys, retrying int64
		of := totals[0].Of
		for len(totals) > 0 && totals[0].Of == of {
			t := totals[0]
			reasons = append(reasons, fmt.Sprintf("%s %d", t.Reason, t.Count))
			count, keys, retrying, totals = count+t.Count, keys+t.HeldKeys, retrying+t.Retrying, totals[1:]
		}
		name := consumerText(of)
		if c.kind == held.Dead {
			name = "relay " + terminal.Plain(of)
		}
		terminal.Add(&text, "%s: %d %s (%s), %s held, %d being retried\n", name, count, string(c.kind), strings.Join(reasons, ", "), human.Count(keys, "key"), retrying)
	}
	return text.String()
}
