package main

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

// payloadShown is how much of a payload is shown without --full.
const payloadShown = 4 << 10

// newShow makes cmd show all about one row.
func newShow(s *cli.Settings, kind held.Kind, cmd *cobra.Command) *cobra.Command {
	var asJSON, full bool
	c := newSelection(s, kind)
	if kind == held.Parked {
		cli.AddText(cmd.Flags(), "consumer", 600, "only what this consumer parked", cli.Into(&c.filter.Consumer))
	}
	cli.AddBool(cmd.Flags(), &full, "full", "the whole payload")
	cli.AddJSON(cmd, &asJSON)
	cmd.Args = cli.OneID(c.name)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), statusMax)
		defer cancel()
		payloadMax := int64(payloadShown)
		if full {
			payloadMax = 1 << 30
		}
		return c.with(ctx, cmd.Flags(), false, func(ctx context.Context, conn *pgx.Conn) error {
			return c.show(ctx, conn, payloadMax, asJSON, cmd.OutOrStdout())
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
		shownPayload := newPayload(d.Payload, d.PayloadBytes)
		if asJSON {
			err = terminal.PrintJSON(out, struct {
				*held.Detail
				payload
			}{d, shownPayload})
		} else {
			_, err = io.WriteString(out, strings.Repeat("\n", min(shown, 1))+c.detail(d, shownPayload))
		}
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

func (c *selection) detail(d *held.Detail, p payload) string {
	var text strings.Builder
	for _, fact := range c.facts(d) {
		terminal.Add(&text, "%-10s %s\n", fact[0], fact[1])
	}
	terminal.Block(&text, "error", d.Error)
	printHeaders(&text, d.Headers)
	switch {
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
	for i, a := range d.Actions {
		if i == 0 {
			text.WriteString("operators\n")
		}
		terminal.Add(&text, "  %s  %s  %s: %s\n", a.When.UTC().Format(time.RFC3339), a.By(), a.What, terminal.Clip(a.Why, 200))
	}
	terminal.Add(&text, "%-10s %s\n", "what to do", d.Do)
	return text.String()
}

// facts are names and values.
func (c *selection) facts(d *held.Detail) [][2]string {
	facts, written := [][2]string{{"id", d.ID.String()}}, ""
	since := fmt.Sprintf("%s, %s ago", d.HeldAt.UTC().Format(time.RFC3339), seconds(d.AgeSeconds))
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
		return "handed back; tried again in " + seconds(*r.RetryInSeconds)
	case r.State == "retry":
		return "handed back; the consumer that holds the partition handles it next"
	}
	return "waits for an operator"
}
