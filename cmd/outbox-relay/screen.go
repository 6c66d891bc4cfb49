package main

import (
	"fmt"
	"io"
	"os"
	"time"
)

// lineEvery is the interval between progress lines where a line cannot be overwritten.
const lineEvery = 2 * time.Second

// screen shows progress: on a terminal in one line that is overwritten, elsewhere in plain lines. A
// failed write is ignored, and the run continues.
type screen struct {
	out      io.Writer
	terminal *terminal // nil: not one
	width    int       // of the line that is overwritten next
	last     time.Time
}

func newScreen(out io.Writer) *screen {
	s := &screen{out: out}
	t, ok := out.(*terminal)
	if !ok || os.Getenv("TERM") == "dumb" {
		return s
	}
	if file, ok := t.out.(*os.File); ok {
		if info, err := file.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
			s.terminal = t
		}
	}
	return s
}

// overwrites reports whether progress is shown in one line that is overwritten.
func (s *screen) overwrites() bool { return s.terminal != nil }

// clear empties a terminal, and moves its cursor to the start.
func (s *screen) clear() {
	if s.overwrites() {
		s.terminal.control("\x1b[H\x1b[2J")
	}
}

// line writes a line that stays.
func (s *screen) line(text string) {
	s.end()
	_ = say(s.out, "%s\n", text)
}

// end keeps the current line and starts a new one.
func (s *screen) end() {
	if s.width > 0 {
		_ = say(s.out, "\n")
		s.width = 0
	}
}

// widthMax is the width of the narrowest terminal in use: a line that wraps cannot be overwritten.
const widthMax = 79

// overwrite replaces the current line.
func (s *screen) overwrite(text string) {
	text = text[:min(len(text), widthMax)]
	s.terminal.control("\r")
	_ = say(s.out, "%-*s", s.width, text)
	s.width = len(text)
}

// step shows progress of work that has no phases.
func (s *screen) step(format string, args ...any) {
	switch {
	case s.overwrites():
		s.overwrite(fmt.Sprintf(format, args...))
	case time.Since(s.last) >= lineEvery:
		s.last = time.Now()
		_ = say(s.out, format+"\n", args...)
	}
}
