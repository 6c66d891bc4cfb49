package command

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// errUnhealthy ends a command that has already printed the problems to stdout.
var errUnhealthy = errors.New("not well")

// answer prints a value as JSON, or the text, and returns errUnhealthy unless all is well.
func answer(out io.Writer, asJSON bool, value any, text string, well bool) error {
	var err error
	if asJSON {
		err = terminal.PrintJSON(out, value)
	} else {
		err = terminal.Write(out, text)
	}
	if err == nil && !well {
		return errUnhealthy
	}
	return err
}

// say prints a value as JSON, or else a text.
func say(out io.Writer, asJSON bool, value any, format string, args ...any) error {
	if asJSON {
		return terminal.PrintJSON(out, value)
	}
	return terminal.Say(out, format, args...)
}

// list prints objects as JSON, one in a line, or as a table, or that there are none.
func list[T any](out io.Writer, asJSON bool, all []T, none, header string, row func(T) string) error {
	switch {
	case asJSON:
		return terminal.PrintObjects(out, all)
	case len(all) == 0:
		return terminal.Say(out, "%s\n", none)
	}
	return terminal.Write(out, table(all, header, row))
}

// table is a text of aligned columns, which tabs separate; empty for nothing.
func table[T any](all []T, header string, row func(T) string) string {
	if len(all) == 0 {
		return ""
	}
	text := header + "\n"
	for _, one := range all {
		text += row(one) + "\n"
	}
	return terminal.Table(text)
}

// Widths of columns, in characters.
const (
	keyWidth   = 32
	errorWidth = 72
	// kafkaErrorWidth is larger: the text holds the commands that end a hanging transaction.
	kafkaErrorWidth = 1000
)

func keyText(key human.Key) string {
	if key == nil {
		return "-"
	}
	if len(key) == 0 {
		return `""`
	}
	return terminal.Clip(key.String(), keyWidth)
}

func fullKey(key human.Key) string {
	switch {
	case key == nil:
		return "none: nothing waits behind it"
	case len(key) == 0:
		return `""`
	}
	return key.String()
}

// payload is a payload as --json shows it.
type payload struct {
	Payload          *string `json:"payload"`        // null: not stored, a tombstone, or not text
	PayloadBase64    *string `json:"payload_base64"` // null: not stored, a tombstone, or text
	PayloadTruncated bool    `json:"payload_truncated"`
	bytes            *int64
	read             int
}

// payloadFlags are --payload and --full.
type payloadFlags struct{ payload, full bool }

func (p *payloadFlags) add(flags *pflag.FlagSet, what string) {
	cli.AddBool(flags, &p.payload, "payload", "also show "+what)
	cli.AddBool(flags, &p.full, "full", "with --payload: do not cut")
	cli.CommandLineOnly(flags, "payload", "full")
}

// bytesMax is how much of a payload is read.
func (p *payloadFlags) bytesMax() int64 {
	switch {
	case !p.payload:
		return 0
	case p.full:
		return 1 << 30
	}
	return payloadShown
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
		p.PayloadBase64 = new(base64.StdEncoding.EncodeToString(read))
	}
	return p
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
