package terminal

import (
	"fmt"
	"io"
	"os"
	"time"
)

// LineEvery is the interval between progress lines where a line cannot be overwritten.
const LineEvery = 2 * time.Second

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

// Overwrite replaces the current line.
func (s *Screen) Overwrite(text string) {
	text = text[:min(len(text), widthMax)]
	s.terminal.control("\r")
	_ = Say(s.out, "%-*s", s.width, text)
	s.width = len(text)
}

// Step shows progress of work that has no phases.
func (s *Screen) Step(format string, args ...any) {
	switch {
	case s.Overwrites():
		s.Overwrite(fmt.Sprintf(format, args...))
	case time.Since(s.last) >= LineEvery:
		s.last = time.Now()
		_ = Say(s.out, format+"\n", args...)
	}
}
