package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

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
	c := newSelection(s, kind)
	c.add(cmd.Flags(), listMax)
	s.AddJSONLines(cmd)
	cmd.Args = cli.OptionalID(c.name)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return c.with(cmd.Context(), cmd.Flags(), false, func(ctx context.Context, conn *pgx.Conn) error {
			return c.list(ctx, conn, s.JSON, cmd.OutOrStdout())
		})
	}
	return cli.Needs(cmd, cli.FlagDatabaseURL)
}

func (c *selection) list(ctx context.Context, conn *pgx.Conn, asJSON bool, out io.Writer) error {
	rows, err := c.kind.List(ctx, conn, c.s.Schema, c.filter, c.limit+1)
	if err != nil {
		return err
	}
	more := len(rows) > c.limit
	rows = rows[:min(len(rows), c.limit)]
	switch {
	case asJSON:
		return terminal.PrintObjects(out, rows)
	case len(rows) == 0:
		return terminal.Say(out, "%s\n", c.nothing())
	}
	totals, err := c.kind.Totals(ctx, conn, c.s.Schema, c.filter)
	if err != nil {
		return err
	}
	text := c.table(rows)
	if more {
		text += fmt.Sprintf("the newest %d: --%s shows more\n", len(rows), flagLimit)
	}
	return terminal.Write(out, text+c.totalsText(totals))
}

func (c *selection) table(rows []held.Row) string {
	var text strings.Builder
	place := "seq\tid\ttopic"
	if c.kind == held.Parked {
		place = "consumer\tid\ttopic/partition/offset"
	}
	text.WriteString(place + "\tkey\treason\tattempts\tage\tbehind it\terror\n")
	for _, r := range rows {
		if c.kind == held.Dead {
			terminal.Add(&text, "%d\t%s\t%s", r.Seq, r.ID, r.Topic)
		} else {
			terminal.Add(&text, "%s\t%s\t%s", consumerText(r.Consumer), r.ID, r.At())
		}
		terminal.Add(&text, "\t%s\t%s\t%d\t%s\t%d\t%s\n", keyText(r.Key), stateText(&r), r.Attempts, human.Seconds(r.AgeSeconds), r.Behind, terminal.Clip(r.Error, errorWidth))
	}
	return terminal.Table(text.String())
}

// stateText is the reason, and the progress of a retry.
func stateText(r *held.Row) string {
	switch {
	case r.State == "retry" && r.RetryInSeconds != nil && *r.RetryInSeconds > 0:
		return r.Reason + " (retried in " + human.Seconds(*r.RetryInSeconds) + ")"
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

// totalsText is one line per relay or consumer. The totals are sorted by it. They count what the
// filter selects, also beyond --limit.
func (c *selection) totalsText(totals []held.Total) string {
	var text strings.Builder
	counted := "in all"
	if c.filter.Narrows() {
		counted = "with this filter"
	}
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
		terminal.Add(&text, "%s: %d %s %s (%s), %s held, %d being retried\n", name, count, string(c.kind), counted, strings.Join(reasons, ", "), human.Count(keys, "key"), retrying)
	}
	return text.String()
}

// payloadShown is how much of a payload is shown without --full.
const payloadShown = 4 << 10

// newShow makes cmd show all about one row.
func newShow(s *cli.Settings, kind held.Kind, cmd *cobra.Command) *cobra.Command {
	var p payloadFlags
	c := newSelection(s, kind)
	if kind == held.Parked {
		cli.AddText(cmd.Flags(), "consumer", 600, "only what this consumer parked", cli.Into(&c.filter.Consumer))
	}
	p.add(cmd.Flags(), "headers and payload")
	s.AddJSON(cmd)
	cmd.Args = cli.OneID(c.name)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return c.with(cmd.Context(), cmd.Flags(), false, func(ctx context.Context, conn *pgx.Conn) error {
			return c.show(ctx, conn, p.bytesMax(), s.JSON, cmd.OutOrStdout())
		})
	}
	return cli.Needs(cmd, cli.FlagDatabaseURL)
}

func (c *selection) show(ctx context.Context, conn *pgx.Conn, payloadMax int64, asJSON bool, out io.Writer) error {
	refs, err := c.kind.Targets(ctx, conn, c.s.Schema, c.filter, listMax)
	if err != nil {
		return err
	}
	shown := 0
	for _, ref := range refs {
		d, err := c.kind.Show(ctx, conn, c.s.Schema, ref, payloadMax)
		if errors.Is(err, held.ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		var shownPayload *payload
		if payloadMax > 0 {
			shownPayload = new(newPayload(d.Payload, d.PayloadBytes))
		} else {
			d.Headers = nil
		}
		err = answer(out, asJSON, struct {
			*held.Detail
			*payload
		}{d, shownPayload}, strings.Repeat("\n", min(shown, 1))+c.detail(d, shownPayload), true)
		if err != nil {
			return err
		}
		shown++
	}
	if shown == 0 {
		return errors.New(c.nothing())
	}
	return nil
}

func (c *selection) detail(d *held.Detail, p *payload) string {
	var text strings.Builder
	for _, fact := range c.facts(d) {
		terminal.Add(&text, "%-10s %s\n", fact[0], fact[1])
	}
	terminal.Block(&text, "error", d.Error)
	printHeaders(&text, d.Headers)
	switch {
	case d.PayloadBytes != nil && p == nil:
		terminal.Add(&text, "%-10s %s: --payload shows them, and the headers\n", "payload", human.Count(*d.PayloadBytes, "byte"))
	case d.PayloadBytes != nil:
		p.printAs(&text, "payload")
	case c.kind == held.Parked && d.Reason == held.ReasonTooLarge:
		terminal.Block(&text, "payload", "not stored")
	default:
		terminal.Block(&text, "payload", "none (a tombstone)")
	}
	if d.Behind > 0 {
		terminal.Add(&text, "behind it  %s\n", human.Count(d.Behind, c.Row))
		for _, n := range d.Next {
			terminal.Add(&text, "  %s  %s", n.ID, n.At())
			if c.kind == held.Parked {
				terminal.Add(&text, "  %s", n.Reason)
			}
			text.WriteString("\n")
		}
		if d.Behind > int64(len(d.Next)) {
			terminal.Add(&text, "  and %d more\n", d.Behind-int64(len(d.Next)))
		}
	}
	text.WriteString(actionsText(d.Actions))
	terminal.Add(&text, "%-10s %s\n", "what to do", d.Do)
	for _, command := range d.Commands {
		terminal.Add(&text, "%-10s %s\n", "", command)
	}
	return text.String()
}

// facts are names and values.
func (c *selection) facts(d *held.Detail) [][2]string {
	facts, written := [][2]string{{"id", d.ID.String()}}, ""
	since := fmt.Sprintf("%s, %s ago", d.HeldAt.UTC().Format(time.RFC3339), human.Seconds(d.AgeSeconds))
	if d.CreatedAt != nil {
		written = ", written " + d.CreatedAt.UTC().Format(time.RFC3339)
	}
	if c.kind == held.Dead {
		since = "since " + since
		facts = append(facts, [2]string{"row", fmt.Sprintf("seq %d of relay %s%s", d.Seq, terminal.Plain(d.Relay), written)}, [2]string{"topic", d.Topic})
	} else {
		facts = append(facts, [2]string{"consumer", fmt.Sprintf("%s (group %s)", consumerText(d.Consumer), terminal.Plain(d.Group))}, [2]string{"record", d.At() + written})
	}
	return append(facts, [][2]string{
		{"key", fullKey(d.Key)}, {"reason", d.Reason + ": " + d.What}, {"state", stateDetail(&d.Row)}, {"attempts", strconv.Itoa(int(d.Attempts))}, {string(c.kind), since},
	}...)
}

// stateDetail says who acts next.
func stateDetail(r *held.Row) string {
	dead := r.Partition == nil
	switch {
	case r.Head != nil:
		return fmt.Sprintf("behind %s, which has to be retried or discarded first", r.Head)
	case dead && r.State != "held":
		return "handed back; the relay publishes it next"
	case dead && r.Reason == "unknown_topic":
		return "waits for the topic, or for an operator"
	case dead && r.Reason == "not_authorized":
		return "waits for the right to use its topic, or for an operator"
	case r.State == "retry" && r.RetryInSeconds != nil && *r.RetryInSeconds > 0:
		return "handed back; tried again in " + human.Seconds(*r.RetryInSeconds)
	case r.State == "retry":
		return "handed back; the consumer that holds the partition handles it next"
	}
	return "waits for an operator"
}
