// Package terminal is how the commands print: texts, tables, JSON and progress. Values that others
// stored cannot control the reader's terminal, and cannot begin a line or a column.
package terminal

import (
	"bytes"
	"fmt"
	"io"
	"sync"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// Writer is the one place through which the program prints. Characters that could control a
// terminal, or mislead its reader (control characters, invisible ones, changes of direction),
// become \uXXXX, which JSON has too. Bytes that are not UTF-8 become \xXX. Line ends and tabs stay:
// code that prints untrusted values escapes those itself, see Fill.
type Writer struct {
	out io.Writer

	mu   sync.Mutex
	rest []byte // the beginning of a character whose end was not written yet
}

// NewWriter returns a Writer that prints to out. Call Flush at the end.
func NewWriter(out io.Writer) *Writer { return &Writer{out: out} }

// Write implements io.Writer. A character may be written in several pieces.
func (t *Writer) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	text := p
	if len(t.rest) > 0 {
		text = append(t.rest, p...)
	}
	safe, rest := escaped(text)
	t.rest = append([]byte{}, rest...)
	if _, err := t.out.Write(safe); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Flush escapes and writes a character whose end was never written.
func (t *Writer) Flush() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, b := range t.rest {
		_, _ = fmt.Fprintf(t.out, `\x%02x`, b)
	}
	t.rest = nil
}

// control writes a control sequence of a terminal.
func (t *Writer) control(sequence string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, _ = io.WriteString(t.out, sequence)
}

// escaped returns the printable form of text, and an incomplete character at its end.
func escaped(text []byte) (safe, rest []byte) {
	if bytes.IndexFunc(text, func(r rune) bool { return r == utf8.RuneError || !harmless(r) }) < 0 {
		return text, nil
	}
	for len(text) > 0 {
		r, size := utf8.DecodeRune(text)
		switch {
		case r == utf8.RuneError && size == 1 && !utf8.FullRune(text):
			return safe, text
		case r == utf8.RuneError && size == 1:
			safe = fmt.Appendf(safe, `\x%02x`, text[0])
		case harmless(r):
			safe = append(safe, text[:size]...)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			safe = fmt.Appendf(safe, `\u%04x\u%04x`, high, low)
		default:
			safe = fmt.Appendf(safe, `\u%04x`, r)
		}
		text = text[size:]
	}
	return safe, nil
}

func harmless(r rune) bool { return unicode.IsPrint(r) || r == '\n' || r == '\t' }
