package consumer

import "sync"

// tracker knows which messages of a partition are in work, in the order of their offsets. Offsets that are
// missing (compacted, aborted) are nothing that it waits for.
type tracker struct {
	mu    sync.Mutex
	open  []*Message // not done, or behind one that is not
	last  *Message   // everything up to it is done; nil: nothing yet
	empty chan struct{}
}

// add begins to track messages; they follow all that were added before.
func (t *tracker) add(msgs []*Message) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.open = append(t.open, msgs...)
}

// done ends messages.
func (t *tracker) done(msgs []*Message) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, msg := range msgs {
		msg.finished = true
	}
	for len(t.open) > 0 && t.open[0].finished {
		t.last, t.open = t.open[0], t.open[1:]
	}
	if len(t.open) == 0 {
		t.open = nil
		if t.empty != nil {
			close(t.empty)
			t.empty = nil
		}
	}
}

// low returns the last message up to which everything is done.
func (t *tracker) low() *Message {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.last
}

func (t *tracker) idle() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.open) == 0
}

// emptied is closed when nothing is open.
func (t *tracker) emptied() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.empty == nil {
		t.empty = make(chan struct{})
		if len(t.open) == 0 {
			close(t.empty)
			done := t.empty
			t.empty = nil
			return done
		}
	}
	return t.empty
}
