package consumer

import (
	"sync"
	"time"
)

// tracker tracks which messages of a partition are in progress, in the order of their offsets. It
// keeps only their offsets and times. It does not wait for missing offsets (compacted, aborted).
type tracker struct {
	mu     sync.Mutex
	base   int // number of the first message in open
	open   []tracked
	passed passed
}

// tracked is a message in progress, or one after it.
type tracked struct {
	behind int64 // offset after it and the control records that follow it
	at     time.Time
	done   bool
}

// passed is the offset up to which everything is done.
type passed struct {
	behind int64 // offset; 0: nothing yet
	at     time.Time
}

// trackedMax bounds how far work runs ahead of the slowest message. After a crash, messages that
// were done ahead of it are redelivered, and dropped because of their claims.
const trackedMax = 200_000

// add begins to track messages; they follow all messages added before.
func (t *tracker) add(msgs []*Message) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, msg := range msgs {
		msg.place = t.base + len(t.open)
		t.open = append(t.open, tracked{behind: msg.next(), at: msg.Time})
	}
}

// done marks messages as done.
func (t *tracker) done(msgs []*Message) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, msg := range msgs {
		t.open[msg.place-t.base].done = true
	}
	n := 0
	for n < len(t.open) && t.open[n].done {
		n++
	}
	if n == 0 {
		return
	}
	t.passed = passed{t.open[n-1].behind, t.open[n-1].at}
	t.base += n
	if t.open = t.open[n:]; len(t.open) == 0 {
		t.open = nil
	}
}

// low returns the offset up to which everything is done.
func (t *tracker) low() passed {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.passed
}

// full reports whether no more messages should be added; idle whether none is in progress.
func (t *tracker) full() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.open) >= trackedMax
}

func (t *tracker) idle() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.open) == 0
}
