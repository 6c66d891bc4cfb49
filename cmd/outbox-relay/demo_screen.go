package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/effectonce/effectonce/internal/demo"
)

// lineEvery is how often progress is written where it cannot be written over itself.
const lineEvery = 2 * time.Second

// screen shows progress: on a terminal in one line that is written over, elsewhere in plain lines. What
// it cannot write is lost; the run goes on.
type screen struct {
	out      io.Writer
	terminal bool
	width    int // of the line that is to be written over
	last     time.Time
	phase    string
}

func newScreen(out io.Writer) *screen {
	s := &screen{out: out}
	if file, ok := out.(*os.File); ok && os.Getenv("TERM") != "dumb" {
		info, err := file.Stat()
		s.terminal = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	return s
}

// line writes a line that stays.
func (s *screen) line(text string) {
	s.end()
	_, _ = fmt.Fprintln(s.out, text)
}

// end leaves the line that was written over as it is.
func (s *screen) end() {
	if s.width > 0 {
		_, _ = fmt.Fprintln(s.out)
		s.width = 0
	}
}

func (s *screen) progress(p demo.Progress) {
	if !s.terminal && p.Phase == s.phase && time.Since(s.last) < lineEvery {
		return
	}
	s.last, s.phase = time.Now(), p.Phase
	if s.terminal {
		s.overwrite(p)
		return
	}
	text := fmt.Sprintf("%5.1fs  orders %d/%d  delivered %d  effects %d  duplicates %d  killed %d  frozen %d",
		p.Elapsed.Seconds(), p.Orders, p.Total, p.Delivered, p.Effects, p.Duplicates, p.Kills, p.Freezes)
	if len(p.Frozen) > 0 {
		text += " (now " + strings.Join(p.Frozen, ", ") + ")"
	}
	_, _ = fmt.Fprintln(s.out, text+"  "+p.Phase)
}

// widthMax is that of the narrowest terminal in use: a line that wraps cannot be written over.
const widthMax = 79

func (s *screen) overwrite(p demo.Progress) {
	text := fmt.Sprintf("%.0fs orders %d delivered %d effects %d duplicates %d kills %d freezes %d",
		p.Elapsed.Seconds(), p.Orders, p.Delivered, p.Effects, p.Duplicates, p.Kills, p.Freezes)
	s.overwriteText(text)
}

func (s *screen) overwriteText(text string) {
	text = text[:min(len(text), widthMax)]
	_, _ = fmt.Fprintf(s.out, "\r%-*s", s.width, text)
	s.width = len(text)
}

// step shows how far something is: like progress, for what has no phases.
func (s *screen) step(format string, args ...any) {
	switch {
	case s.terminal:
		s.overwriteText(fmt.Sprintf(format, args...))
	case time.Since(s.last) >= lineEvery:
		s.last = time.Now()
		_, _ = fmt.Fprintf(s.out, format+"\n", args...)
	}
}
