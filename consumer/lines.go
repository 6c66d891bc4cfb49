package consumer

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

// lines are the queues of messages that wait for the workers of a partition. Each key has a line,
// from which one worker at a time takes messages. So a slow or retried key delays only itself. Each
// message without a key has its own line; with OrderUnordered each message has.
type lines struct {
	workers  int
	batchMax int
	wake     chan struct{} // buffers one signal: something can be taken
	room     chan struct{} // buffers one signal: something was taken

	mu       sync.Mutex
	byKey    map[keyHash]*line
	messages []*line // that may have messages to be taken, in the order in which they came
	retries  []*line // the same for parked messages
	waiting  int     // waiting messages
	bytes    int
	retrying int       // workers that retry parked messages
	retried  bool      // the last share was a retry
	paused   time.Time // until then nothing is taken
}

// line is the waiting messages of one key.
type line struct {
	hash  keyHash
	keyed bool
	msgs  []*Message
	dues  []due
	taken bool // a worker has it
	waits bool // its first message is postponed: done does not release it
}

// share is what a worker takes: messages, or one due parked message, and the lines that it holds
// until done.
type share struct {
	lines []*line
	msgs  []*Message
	due   due // seq 0: none
}

func newLines(workers, batchMax int) *lines {
	return &lines{
		workers: workers, batchMax: batchMax, wake: make(chan struct{}, 1), room: make(chan struct{}, 1), byKey: map[keyHash]*line{},
	}
}

func signal(to chan struct{}) {
	select {
	case to <- struct{}{}:
	default:
	}
}

// put adds messages; hash returns the key of each message's line, nil: it gets its own line.
func (l *lines) put(msgs []*Message, hash func(*Message) *keyHash) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, msg := range msgs {
		to := l.line(hash(msg))
		if to.msgs = append(to.msgs, msg); len(to.msgs) == 1 && !to.taken {
			l.messages = append(l.messages, to)
		}
		l.waiting++
		l.bytes += msg.size()
	}
	signal(l.wake)
}

// retry adds a parked message that is due.
func (l *lines) retry(d due, hash *keyHash) {
	l.mu.Lock()
	defer l.mu.Unlock()
	to := l.line(hash)
	if to.dues = append(to.dues, d); len(to.dues) == 1 && !to.taken {
		l.retries = append(l.retries, to)
	}
	signal(l.wake)
}

func (l *lines) line(hash *keyHash) *line {
	if hash == nil {
		return &line{}
	}
	found := l.byKey[*hash]
	if found == nil {
		found = &line{hash: *hash, keyed: true}
		l.byKey[*hash] = found
	}
	return found
}

// full reports whether no more messages should be added.
func (l *lines) full() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.waiting >= 2*l.batchMax*l.workers || l.bytes >= waitingBytesMax
}

// next returns what a worker does next; without lines: nothing can be taken. Retries of parked
// messages get at most half of the workers. With one worker they alternate with other messages.
func (l *lines) next(batch int) share {
	l.mu.Lock()
	defer l.mu.Unlock()
	var s share
	if time.Now().Before(l.paused) {
		return s
	}
	l.retries = slices.DeleteFunc(l.retries, func(line *line) bool { return line.taken || len(line.dues) == 0 })
	if len(l.retries) > 0 && l.retrying < max(l.workers/2, 1) && (!l.retried || l.waiting == 0 || l.workers > 1) {
		from := l.retries[0]
		l.retries = l.retries[1:]
		s.due, from.dues = from.dues[0], from.dues[1:]
		from.taken, l.retried = true, true
		l.retrying++
		s.lines = append(s.lines, from)
	} else {
		l.takeMessages(&s, batch)
		l.retried = false
	}
	if len(s.lines) > 0 {
		signal(l.wake) // there may be more
		signal(l.room)
	}
	return s
}

// takeMessages takes a fair part of the waiting messages: what one worker takes, no other worker
// can handle in parallel.
func (l *lines) takeMessages(s *share, batch int) {
	limit := min(max((l.waiting+l.workers-1)/l.workers, 1), batch)
	n := 0
	for ; n < len(l.messages) && len(s.msgs) < limit; n++ {
		from := l.messages[n]
		l.messages[n] = nil
		if from.taken || len(from.msgs) == 0 {
			continue // it was added twice
		}
		some := min(limit-len(s.msgs), len(from.msgs))
		s.msgs = append(s.msgs, from.msgs[:some]...)
		clear(from.msgs[:some]) // the line must not keep finished messages alive
		if from.msgs = from.msgs[some:]; len(from.msgs) == 0 {
			from.msgs = nil
		}
		from.taken = true
		s.lines = append(s.lines, from)
	}
	if l.messages = l.messages[n:]; len(l.messages) == 0 {
		l.messages = nil
	}
	for _, msg := range s.msgs {
		l.bytes -= msg.size()
	}
	l.waiting -= len(s.msgs)
	slices.SortFunc(s.msgs, func(a, b *Message) int { return cmp.Compare(a.Offset, b.Offset) })
}

// postpone puts messages that a worker has back to the front of their lines, which wait; pause: all
// lines wait.
func (l *lines) postpone(msgs []*Message, hash func(*Message) *keyHash, wait time.Duration, pause bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var lines []*line
	for _, msg := range slices.Backward(msgs) {
		to := l.line(hash(msg))
		to.msgs, to.taken, to.waits = slices.Insert(to.msgs, 0, msg), true, true
		lines = append(lines, to)
		l.waiting++
		l.bytes += msg.size()
	}
	if pause {
		l.paused = time.Now().Add(wait)
	}
	time.AfterFunc(wait, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, from := range lines {
			from.waits = false
			l.release(from)
		}
		signal(l.wake)
	})
}

// release makes what is left of a line available again, at the end of the others.
func (l *lines) release(from *line) {
	from.taken = false
	if len(from.msgs) > 0 {
		l.messages = append(l.messages, from)
	}
	if len(from.dues) > 0 {
		l.retries = append(l.retries, from)
	}
	if from.keyed && len(from.msgs) == 0 && len(from.dues) == 0 {
		delete(l.byKey, from.hash)
	}
}

// done releases the lines of a share.
func (l *lines) done(s share) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s.due.seq != 0 {
		l.retrying--
	}
	signal(l.room)
	for _, from := range s.lines {
		if !from.waits {
			l.release(from)
		}
	}
	signal(l.wake)
}
