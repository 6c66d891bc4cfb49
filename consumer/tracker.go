package consumer

import (
	"sync"
	"time"
)

// tracker knows which messages of a partition are in work, in the order of their offsets, and keeps nothing of them
// but where they are. Offsets that are missing (compacted, aborted) are nothing that it waits for.
type tracker struct {
	mu     sync.Mutex
	base   int // number of the first of open
	open   []tracked
	passed passed
}

// tracked is a message in work, or behind one that is.
type tracked struct {
	behind int64 // offset behind it and the control records that follow it
	at     time.Time
	done   bool
}

// passed is up to where everything is done.
type passed struct {
	behind int64 // offset; 0: nothing yet
	at     time.Time
}

// trackedMax bounds how far work runs ahead of the slowest message: what is done there comes again after a crash, and
// is dropped by its claim.
const trackedMax = 200_000

// add begins to track messages; they follow all that were added before.
func (t *tracker) add(msgs []*Message) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, msg := range msgs {
		msg.place = t.base + len(t.open)
		t.open = append(t.open, tracked{behind: msg.next(), at: msg.Time})
	}
}

// done ends messages.
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

// low returns up to where everything is done.
func (t *tracker) low() passed {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.passed
}

// full reports whether no more messages should be added; idle whether none is in work.
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
