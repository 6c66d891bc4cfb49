package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/internal/parked"
)

// payloadShown is how much of a payload is shown without --full.
const payloadShown = 4 << 10

func newParkedShow(s *settings) *cobra.Command {
	var asJSON, full bool
	var filter parkedFilter
	cmd := needs(&cobra.Command{
		Use:   "show ID",
		Short: "Show everything about a parked message, and what to do",
		Long: `Show everything about a parked message: headers and payload, the error in full, what waits behind it,
what operators did with it, and what to do. ID is the message's ID, as the log shows it or as the
message carried it, or topic/partition/offset. Several are shown if several consumers parked it.

The payload is shown as text, or as base64 if it is none, up to 4 KiB unless --full.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("%s takes one ID: see %s --help", cmd.CommandPath(), cmd.CommandPath())
			}
			if args[0] == "" || len(args[0]) > 1024 || !utf8.ValidString(args[0]) || strings.ContainsRune(args[0], 0) {
				return errors.New("ID: want 1 to 1024 bytes of UTF-8")
			}
			filter.id = args[0]
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), statusMax)
			defer cancel()
			payloadMax := int64(payloadShown)
			if full {
				payloadMax = 1 << 30
			}
			return s.withTables(ctx, false, func(ctx context.Context, conn *pgx.Conn) error {
				return s.parkedShow(ctx, conn, filter, payloadMax, asJSON, cmd.OutOrStdout())
			})
		},
	}, flagDatabaseURL)
	addText(cmd.Flags(), "consumer", 600, "only what this consumer parked", into(&filter.Consumer))
	addBool(cmd.Flags(), &full, "full", "the whole payload")
	addJSON(cmd, &asJSON)
	return cmd
}

func (s *settings) parkedShow(ctx context.Context, conn *pgx.Conn, filter parkedFilter, payloadMax int64, asJSON bool, out io.Writer) error {
	if err := filter.find(ctx, conn, s.schema); err != nil {
		return err
	}
	seqs, err := parked.Targets(ctx, conn, s.schema, filter.Filter, parkedListMax)
	if err != nil {
		return err
	}
	shown := 0
	for _, seq := range seqs {
		detail, err := parked.Show(ctx, conn, s.schema, seq, payloadMax)
		if errors.Is(err, parked.ErrNotFound) {
			continue // gone since
		}
		if err != nil {
			return err
		}
		if asJSON {
			err = printJSON(out, newShown(detail))
		} else {
			err = printDetail(out, detail, shown > 0)
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

// shownMessage is what "parked show --json" prints of a message.
type shownMessage struct {
	*parked.Detail
	Payload          *string `json:"payload"`        // null: not there, or no text
	PayloadBase64    *string `json:"payload_base64"` // null: not there, or text
	PayloadTruncated bool    `json:"payload_truncated"`
	What             string  `json:"what"`
	Do               string  `json:"do"`
}

func newShown(d *parked.Detail) shownMessage {
	advice := parked.AdviceFor(d.Reason)
	v := shownMessage{Detail: d, What: advice.What, Do: advice.Do}
	if d.PayloadBytes == nil {
		return v
	}
	v.PayloadTruncated = int64(len(d.Payload)) < *d.PayloadBytes
	if text, ok := payloadText(d.Payload, v.PayloadTruncated); ok {
		v.Payload = &text
	} else {
		encoded := base64.StdEncoding.EncodeToString(d.Payload)
		v.PayloadBase64 = &encoded
	}
	return v
}

// payloadText is the payload as text, if it is some. Where it was cut, so may be its last character.
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

func printDetail(out io.Writer, d *parked.Detail, again bool) error {
	var text strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&text, "%-10s %s\n", name, fmt.Sprintf(format, args...))
	}
	if again {
		text.WriteString("\n")
	}
	advice := parked.AdviceFor(d.Reason)
	line("id", "%s", d.ID)
	line("consumer", "%s (group %s)", consumerText(d.Consumer), plain(d.Group))
	line("record", "%s%s", d.At(), recordTime(d.RecordTime))
	line("key", "%s", fullKey(d.Key))
	line("reason", "%s: %s", d.Reason, advice.What)
	line("state", "%s", stateDetail(&d.Message))
	line("attempts", "%d", d.Attempts)
	line("parked", "%s, %s ago", d.ParkedAt.UTC().Format(time.RFC3339), seconds(d.AgeSeconds))
	block(&text, "error", d.Error)
	printHeaders(&text, d.Headers)
	printPayload(&text, d)
	if d.Behind > 0 {
		fmt.Fprintf(&text, "behind it  %d messages\n", d.Behind)
		for _, m := range d.Next {
			fmt.Fprintf(&text, "  %s  %s  %s\n", m.ID, m.At(), m.Reason)
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

func recordTime(at *time.Time) string {
	if at == nil {
		return ""
	}
	return ", written " + at.UTC().Format(time.RFC3339)
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

// stateDetail says who has to do something next.
func stateDetail(m *parked.Message) string {
	switch {
	case m.Head != nil:
		return fmt.Sprintf("behind %s, which has to be retried or discarded first", m.Head)
	case m.State == "retry" && m.RetryInSeconds != nil && *m.RetryInSeconds > 0:
		return "handed back; tried again in " + seconds(*m.RetryInSeconds)
	case m.State == "retry":
		return "handed back; the consumer that holds the partition handles it next"
	}
	return "waits for an operator"
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

// printHeaders writes the headers as they are stored: see docs/schema.md, outbox.
func printHeaders(text *strings.Builder, stored json.RawMessage) {
	var headers map[string]json.RawMessage
	if json.Unmarshal(stored, &headers) != nil || len(headers) == 0 {
		return
	}
	text.WriteString("headers\n")
	for _, name := range slices.Sorted(maps.Keys(headers)) {
		fmt.Fprintf(text, "  %s: %s\n", printable(name), printable(string(headers[name])))
	}
}

func printPayload(text *strings.Builder, d *parked.Detail) {
	shown := newShown(d)
	switch {
	case d.PayloadBytes == nil && d.Reason == parked.ReasonTooLarge:
		block(text, "payload", "not stored")
	case d.PayloadBytes == nil:
		block(text, "payload", "none (a tombstone)")
	case shown.Payload != nil:
		block(text, "payload", fmt.Sprintf("%d bytes of text", *d.PayloadBytes))
		indent(text, *shown.Payload)
	default:
		block(text, "payload", fmt.Sprintf("%d bytes, in base64", *d.PayloadBytes))
		indent(text, *shown.PayloadBase64)
	}
	if shown.PayloadTruncated {
		fmt.Fprintf(text, "  (the first %d bytes: --full shows all)\n", len(d.Payload))
	}
}
