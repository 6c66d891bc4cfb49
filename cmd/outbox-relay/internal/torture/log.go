package torture

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// log is what happened, for people: each line goes to the terminal and to a file of the round.
type log struct {
	mu    sync.Mutex
	out   io.Writer
	file  *os.File
	begun time.Time
}

func newLog(out io.Writer, path string) (*log, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600) //nolint:gosec // in the directory of the round
	return &log{out: out, file: file, begun: time.Now()}, err
}

func (l *log) say(format string, args ...any) {
	text := fmt.Sprintf("%8.3f  ", time.Since(l.begun).Seconds()) + fmt.Sprintf(format, args...) + "\n"
	l.mu.Lock()
	defer l.mu.Unlock()
	_, _ = io.WriteString(l.file, text)
	_, _ = io.WriteString(l.out, text)
}

func (l *log) close() error { return l.file.Close() }
