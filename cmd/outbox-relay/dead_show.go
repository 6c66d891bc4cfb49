package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/internal/dead"
	"github.com/effectonce/effectonce/internal/parked"
)

func newDeadShow(s *settings) *cobra.Command {
	var asJSON, full bool
	var filter deadFilter
	cmd := needs(&cobra.Command{
		Use:   "show ID",
		Short: "Show everything about a dead row, and what to do",
		Long: `Show everything about a row that Kafka did not take: headers and payload, the error in full, what waits
behind it, what operators did with it, and what to do. ID is the row's id or its seq, as the relay's log
shows them. Several are shown if the row is dead for several relays: --relay chooses one.

The payload is shown as text, or as base64 if it is none, up to 4 KiB unless --full.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("%s takes one ID: see %s --help", cmd.CommandPath(), cmd.CommandPath())
			}
			filter.id = true
			return filter.SetID(args[0])
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), statusMax)
			defer cancel()
			filter.settle(s, cmd)
			payloadMax := int64(payloadShown)
			if full {
				payloadMax = 1 << 30
			}
			return s.withTables(ctx, false, func(ctx context.Context, conn *pgx.Conn) error {
				return s.deadShow(ctx, conn, filter, payloadMax, asJSON, cmd.OutOrStdout())
			})
		},
	}, flagDatabaseURL)
	addBool(cmd.Flags(), &full, "full", "the whole payload")
	addJSON(cmd, &asJSON)
	return cmd
}

func (s *settings) deadShow(ctx context.Context, conn *pgx.Conn, filter deadFilter, payloadMax int64, asJSON bool, out io.Writer) error {
	places, err := dead.Targets(ctx, conn, s.schema, filter.Filter, parkedListMax)
	if err != nil {
		return err
	}
	shown := 0
	for _, place := range places {
		detail, err := dead.Show(ctx, conn, s.schema, place, payloadMax)
		if errors.Is(err, dead.ErrNotFound) {
			continue // gone since
		}
		if err != nil {
			return err
		}
		if asJSON {
			err = printJSON(out, newShownDead(detail))
		} else {
			err = printDeadDetail(out, detail, shown > 0)
		}
		if err != nil {
			return err
		}
		shown++
	}
	if shown == 0 {
		return filter.nothing()
	}
	return nil
}

// shownDead is what "dead show --json" prints of a row.
type shownDead struct {
	*dead.Detail
	Payload          *string `json:"payload"`        // null: a tombstone, or no text
	PayloadBase64    *string `json:"payload_base64"` // null: a tombstone, or text
	PayloadTruncated bool    `json:"payload_truncated"`
	What             string  `json:"what"`
	Do               string  `json:"do"`
}

func newShownDead(d *dead.Detail) shownDead {
	payload, advice := newShown(payloadOf(d)), dead.AdviceFor(d.Reason)
	return shownDead{d, payload.Payload, payload.PayloadBase64, payload.PayloadTruncated, advice.What, advice.Do}
}

// payloadOf is the payload as "parked show" shows one.
func payloadOf(d *dead.Detail) *parked.Detail {
	return &parked.Detail{Message: parked.Message{PayloadBytes: d.PayloadBytes}, Payload: d.Payload}
}

func printDeadDetail(out io.Writer, d *dead.Detail, again bool) error {
	var text strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&text, "%-10s %s\n", name, fmt.Sprintf(format, args...))
	}
	if again {
		text.WriteString("\n")
	}
	advice := dead.AdviceFor(d.Reason)
	line("id", "%s", d.ID)
	line("row", "seq %d of relay %s, written %s", d.Seq, plain(d.Relay), d.CreatedAt.UTC().Format(time.RFC3339))
	line("topic", "%s", d.Topic)
	line("key", "%s", fullKey(d.Key))
	line("reason", "%s: %s", d.Reason, advice.What)
	line("state", "%s", deadState(&d.Row))
	line("attempts", "%d", d.Attempts)
	line("dead", "since %s, %s ago", d.DiedAt.UTC().Format(time.RFC3339), seconds(d.AgeSeconds))
	block(&text, "error", d.Error)
	printHeaders(&text, d.Headers)
	printPayload(&text, payloadOf(d))
	if d.Behind > 0 {
		fmt.Fprintf(&text, "behind it  %d rows\n", d.Behind)
		for _, r := range d.Next {
			fmt.Fprintf(&text, "  %s  seq %d\n", r.ID, r.Seq)
		}
		if d.Behind > int64(len(d.Next)) {
			fmt.Fprintf(&text, "  and %d more\n", d.Behind-int64(len(d.Next)))
		}
	}
	for i, a := range d.Actions {
		if i == 0 {
			text.WriteString("operators\n")
		}
		fmt.Fprintf(&text, "  %s  %s  %s: %s\n", a.When.UTC().Format(time.RFC3339), printable(a.Who), printable(a.What), clip(a.Why, 200))
	}
	line("what to do", "%s", advice.Do)
	_, err := io.WriteString(out, text.String())
	return err
}

// deadState says who has to do something next.
func deadState(r *dead.Row) string {
	switch {
	case r.Head != nil:
		return fmt.Sprintf("behind %s, which has to be retried or discarded first", r.Head)
	case r.State != "held":
		return "handed back; the relay publishes it next"
	case r.Reason == "unknown_topic":
		return "waits for the topic, or for an operator"
	}
	return "waits for an operator"
}
