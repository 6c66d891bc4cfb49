// Package terminal is how the commands print: texts, tables, JSON and progress. Values that others
// stored cannot control the reader's terminal, and cannot begin a line or a column.
package terminal

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
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

// lineEvery is the interval between progress lines where a line cannot be overwritten.
const lineEvery = 2 * time.Second

// Screen shows progress: on a terminal in one line that is overwritten, elsewhere in plain lines. A
// failed write is ignored, and the run continues.
type Screen struct {
	out      io.Writer
	terminal *Writer // nil: not one
	width    int     // of the line that is overwritten next
	last     time.Time
}

// NewScreen shows progress on out. A line is only overwritten if out is a Writer to a terminal.
func NewScreen(out io.Writer) *Screen {
	s := &Screen{out: out}
	if t, ok := out.(*Writer); ok && IsTerminal(t.out) && os.Getenv("TERM") != "dumb" { //nolint:forbidigo // about the terminal, as out is
		s.terminal = t
	}
	return s
}

// IsTerminal reports whether a reader or a writer is a terminal.
func IsTerminal(stream any) bool {
	file, ok := stream.(*os.File)
	if !ok {
		return false
	}
	info, err := file.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// Overwrites reports whether progress is shown in one line that is overwritten.
func (s *Screen) Overwrites() bool { return s.terminal != nil }

// Clear empties a terminal, and moves its cursor to the start.
func (s *Screen) Clear() {
	if s.Overwrites() {
		s.terminal.control("\x1b[H\x1b[2J")
	}
}

// Line writes a line that stays.
func (s *Screen) Line(text string) {
	s.End()
	_ = Say(s.out, "%s\n", text)
}

// End keeps the current line and starts a new one.
func (s *Screen) End() {
	if s.width > 0 {
		_ = Say(s.out, "\n")
		s.width = 0
	}
}

// widthMax is the width of the narrowest terminal in use: a line that wraps cannot be overwritten.
const widthMax = 79

// Step shows progress: on a terminal it replaces the current line.
func (s *Screen) Step(format string, args ...any) {
	switch {
	case s.Overwrites():
		text := fmt.Sprintf(format, args...)
		text = text[:min(len(text), widthMax)]
		s.terminal.control("\r")
		_ = Say(s.out, "%-*s", s.width, text)
		s.width = len(text)
	case time.Since(s.last) >= lineEvery:
		s.last = time.Now()
		_ = Say(s.out, format+"\n", args...)
	}
}
