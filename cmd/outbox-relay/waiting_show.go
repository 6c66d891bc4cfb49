package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/queue"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// payloadShown is how much of a payload is shown without --full.
const payloadShown = 4 << 10

// newShow makes cmd show all about one row.
func newShow[P, R any](s *cli.Settings, w waiting[P, R], cmd *cobra.Command) *cobra.Command {
	var asJSON, full bool
	cli.AddBool(cmd.Flags(), &full, "full", "the whole payload")
	cli.AddJSON(cmd, &asJSON)
	cmd.Args = cli.OneID(w.name)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		payloadMax := int64(payloadShown)
		if full {
			payloadMax = 1 << 30
		}
		return read(cmd, s, w, func(ctx context.Context, conn *pgx.Conn) error {
			return show(ctx, conn, w, payloadMax, asJSON, cmd.OutOrStdout())
		})
	}
	return cli.Needs(cmd, cli.FlagDatabaseURL)
}

func show[P, R any](ctx context.Context, conn *pgx.Conn, w waiting[P, R], payloadMax int64, asJSON bool, out io.Writer) error {
	places, err := w.targets(ctx, conn, parkedListMax)
	if err != nil {
		return err
	}
	shown := 0
	for _, place := range places {
		d, err := w.show(ctx, conn, place, payloadMax)
		if errors.Is(err, queue.ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		if asJSON {
			err = terminal.PrintJSON(out, d.json)
		} else {
			_, err = io.WriteString(out, strings.Repeat("\n", min(shown, 1))+d.text())
		}
		if err != nil {
			return err
		}
		shown++
	}
	if shown == 0 {
		return errors.New(w.nothing())
	}
	return nil
}

// detail is all about a row, as it is shown.
type detail struct {
	json     any
	id       uuid.UUID
	facts    [][2]string // name and value
	err      string
	headers  json.RawMessage
	payload  payload
	unstored bool // the payload was too large to be stored
	behind   int64
	row      string   // what one of them is called
	next     []string // the first rows behind it
	actions  []operator.Action
	advice   queue.Advice
}

func (d *detail) text() string {
	var text strings.Builder
	terminal.Add(&text, "%-10s %s\n", "id", d.id)
	for _, fact := range d.facts {
		terminal.Add(&text, "%-10s %s\n", fact[0], fact[1])
	}
	terminal.Block(&text, "error", d.err)
	printHeaders(&text, d.headers)
	d.payload.print(&text, d.unstored)
	if d.behind > 0 {
		terminal.Add(&text, "behind it  %s\n", human.Count(d.behind, d.row))
		for _, next := range d.next {
			terminal.Add(&text, "  %s\n", next)
		}
		if d.behind > int64(len(d.next)) {
			terminal.Add(&text, "  and %d more\n", d.behind-int64(len(d.next)))
		}
	}
	for i, a := range d.actions {
		if i == 0 {
			text.WriteString("operators\n")
		}
		terminal.Add(&text, "  %s  %s  %s: %s\n", a.When.UTC().Format(time.RFC3339), a.By(), a.What, terminal.Clip(a.Why, 200))
	}
	terminal.Add(&text, "%-10s %s\n", "what to do", d.advice.Do)
	return text.String()
}

// payload is a payload as --json shows it.
type payload struct {
	Payload          *string `json:"payload"`        // null: not stored, a tombstone, or not text
	PayloadBase64    *string `json:"payload_base64"` // null: not stored, a tombstone, or text
	PayloadTruncated bool    `json:"payload_truncated"`
	bytes            *int64
	read             int
}

// newPayload takes the bytes read of a payload, and the size of the whole payload.
func newPayload(read []byte, bytes *int64) payload {
	p := payload{bytes: bytes, read: len(read)}
	if bytes == nil {
		return p
	}
	p.PayloadTruncated = int64(len(read)) < *bytes
	if text, ok := payloadText(read, p.PayloadTruncated); ok {
		p.Payload = &text
	} else {
		encoded := base64.StdEncoding.EncodeToString(read)
		p.PayloadBase64 = &encoded
	}
	return p
}

func (p payload) print(text *strings.Builder, unstored bool) {
	switch {
	case p.bytes == nil && unstored:
		terminal.Block(text, "payload", "not stored")
	case p.bytes == nil:
		terminal.Block(text, "payload", "none (a tombstone)")
	default:
		p.printAs(text, "payload")
	}
}

// printAs writes the bytes read of a payload that is stored.
func (p payload) printAs(text *strings.Builder, name string) {
	if p.Payload != nil {
		terminal.Block(text, name, human.Count(*p.bytes, "byte")+" of text")
		terminal.Indent(text, *p.Payload)
	} else {
		terminal.Block(text, name, human.Count(*p.bytes, "byte")+", in base64")
		terminal.Indent(text, *p.PayloadBase64)
	}
	if p.PayloadTruncated {
		terminal.Add(text, "  (the first %d bytes: --full shows all)\n", p.read)
	}
}

// payloadText returns the payload as text, if it is UTF-8. The last character of a truncated
// payload may be incomplete.
func payloadText(payload []byte, truncated bool) (text string, ok bool) {
	for range utf8.UTFMax {
		if utf8.Valid(payload) {
			return string(payload), true
		}
		if !truncated || len(payload) == 0 {
			break
		}
		payload = payload[:len(payload)-1]
	}
	return "", false
}

// printHeaders writes the headers as they are stored: see docs/reference/schema.md, outbox.
func printHeaders(text *strings.Builder, stored json.RawMessage) {
	var headers map[string]json.RawMessage
	if json.Unmarshal(stored, &headers) != nil || len(headers) == 0 {
		return
	}
	text.WriteString("headers\n")
	for _, name := range slices.Sorted(maps.Keys(headers)) {
		terminal.Add(text, "  %s: %s\n", name, terminal.Printable(string(headers[name])))
	}
}
