package consumer

import (
	"cmp"
	"crypto/sha256"
	"slices"
	"sync"
	"time"
)

// workers distribute the messages of one partition to its lanes. With OrderByPartition there is one
// line of messages. With OrderByKey one lane at a time handles the messages of a key, in order. With
// OrderUnordered any free one handles the next message. The claims record what is done. The stored
// position follows the lowest message that is not done, so that after a crash no message is missed and
// few are redelivered.
type workers struct {
	order    Order
	batchMax int
	wake     chan struct{} // buffers one signal: something can be taken
	room     chan struct{} // buffers one signal: something was taken or done

	mu        sync.Mutex
	lines     map[keyHash]*line // of the keys that have messages waiting or in progress
	ready     []*line           // that may have messages to be taken, in the order in which they came
	waiting   int               // messages
	bytes     int               // of these
	paused    time.Time         // until then nothing is taken
	ended     bool
	retrying  int                // lanes that retry parked messages
	releasing map[int64]struct{} // parked messages that wait for a lane, or have one

	// In progress, in the order of their offsets: it does not wait for missing offsets (compacted,
	// aborted).
	open   []tracked
	base   int // number of the first one
	passed passed
}

// line is messages that wait for each other: of the partition, of a key, or one alone.
type line struct {
	hash  *keyHash // nil: no other message belongs to it
	msgs  []*Message
	dues  []due // parked messages, which come first
	taken bool  // a lane has it, or it waits
	ready bool  // it is in the list of lines that may have something
}

// share is what a lane takes: messages, or due parked messages, and the lines that it holds.
type share struct {
	lines []*line
	msgs  []*Message
	dues  []due
}

// tracked is a message in progress, or one after it.
type tracked struct {
	passed

	done bool
}

// passed is an offset up to which everything is done, behind control records, too; 0: nothing yet.
type passed struct {
	behind int64
	at     time.Time
}

const (
	// advanceEvery is how often the position is stored.
	advanceEvery = 100 * time.Millisecond
	// trackedMax bounds how far work runs ahead of the slowest message. After a crash, messages that
	// were done ahead of it are redelivered, and dropped because of their claims.
	trackedMax = 200_000
)

func newWorkers(order Order, batchMax int) *workers {
	return &workers{
		order: order, batchMax: batchMax, wake: make(chan struct{}, 1), room: make(chan struct{}, 1), lines: map[keyHash]*line{}, releasing: map[int64]struct{}{},
	}
}

func signal(to chan struct{}) {
	select {
	case to <- struct{}{}:
	default:
	}
}

// alone copies a message into its own memory: the client reads many records into one buffer, and a
// slow message must not keep that buffer alive.
func (m *Message) alone() *Message {
	own, record := *m, *m.record
	buffer := make([]byte, 0, m.size())
	keep := func(b []byte) []byte {
		if b == nil {
			return nil
		}
		begin := len(buffer)
		buffer = append(buffer, b...)
		return buffer[begin:len(buffer):len(buffer)]
	}
	own.Key, own.Value = keep(m.Key), keep(m.Value)
	own.Headers, record.Headers = make([]Header, len(m.Headers)), slices.Clone(record.Headers)
	for n, header := range m.Headers {
		own.Headers[n] = Header{Name: header.Name, Value: keep(header.Value)}
		record.Headers[n].Value = own.Headers[n].Value
	}
	record.Key, record.Value = own.Key, own.Value
	own.record = &record
	return &own
}

// line returns the line of a key; the caller holds the mutex.
func (w *workers) line(hash []byte) *line {
	if hash == nil || w.order == OrderUnordered {
		return &line{}
	}
	found := w.lines[keyHash(hash)]
	if found == nil {
		key := keyHash(hash)
		found = &line{hash: &key}
		w.lines[key] = found
	}
	return found
}

func (w *workers) lineOf(msg *Message) *line {
	switch {
	case w.order == OrderByPartition:
		return w.line(make([]byte, sha256.Size)) // of the partition; parked messages have lines of their own
	case msg.Key == nil || w.order == OrderUnordered:
		return w.line(nil)
	}
	hash := sha256.Sum256(msg.Key)
	return w.line(hash[:])
}

// add adds messages, which follow all that were added before.
func (w *workers) add(msgs []*Message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, msg := range msgs {
		msg.place = w.base + len(w.open)
		w.open = append(w.open, tracked{passed: passed{msg.next(), msg.Time}})
		to := w.lineOf(msg)
		to.msgs = append(to.msgs, msg)
		w.offer(to)
		w.waiting++
		w.bytes += msg.size()
	}
	signal(w.wake)
}

// offer makes a line available, if it has something.
func (w *workers) offer(l *line) {
	switch {
	case l.taken, l.ready:
	case len(l.msgs)+len(l.dues) > 0:
		l.ready = true
		w.ready = append(w.ready, l)
	case l.hash != nil:
		delete(w.lines, *l.hash)
	}
}

// release adds parked messages that are due.
func (w *workers) release(list []due) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, d := range list {
		if _, under := w.releasing[d.seq]; under {
			continue
		}
		w.releasing[d.seq] = struct{}{}
		to := w.line(d.hash)
		to.dues = append(to.dues, d)
		w.offer(to)
	}
	signal(w.wake)
}

// full reports whether no more messages should be added for n workers.
func (w *workers) full(n int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.waiting >= 2*w.batchMax*n || w.bytes >= waitingBytesMax || len(w.open) >= trackedMax
}

// idle reports whether nothing waits and nothing is in progress.
func (w *workers) idle() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.open) == 0 && len(w.releasing) == 0
}

// take returns what a lane does next; without lines: nothing can be taken. It is a fair part of the
// waiting messages (what one of n lanes takes, no other one can handle in parallel), or of the parked
// messages that are due: retries get at most half of the lanes. What was tried before is tried alone.
func (w *workers) take(n, batch int) (s share) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Now().Before(w.paused) {
		return s
	}
	part := func(all int) int { return min(max((all+n-1)/n, 1), batch) }
	ready := 0
	for _, from := range w.ready {
		ready += len(from.msgs)
	}
	limit, limitDues := part(ready), part(len(w.releasing))
	kept := w.ready[:0]
	for _, from := range w.ready {
		some := 0
		switch {
		case len(from.dues) > 0 && len(s.msgs) == 0 && (len(s.dues) > 0 || w.retrying < max(n/2, 1)):
			for some < len(from.dues) && len(s.dues) < limitDues && (len(s.dues) == 0 || !from.dues[some].tried && !s.dues[0].tried) {
				s.dues = append(s.dues, from.dues[some])
				some++
			}
			from.dues = from.dues[some:]
		case len(from.dues) == 0 && len(s.dues) == 0 && len(s.msgs) < limit:
			switch tried := !from.msgs[0].first.IsZero(); {
			case !tried:
				some = min(limit-len(s.msgs), len(from.msgs))
			case len(s.msgs) == 0:
				some, limit = 1, 1
			}
			s.msgs = append(s.msgs, from.msgs[:some]...)
			from.msgs = slices.Clone(from.msgs[some:]) // the line must not keep finished messages alive
		}
		if some == 0 {
			kept = append(kept, from)
			continue
		}
		from.taken, from.ready = true, false
		s.lines = append(s.lines, from)
	}
	if len(s.dues) > 0 {
		w.retrying++
	}
	clear(w.ready[len(kept):])
	if w.ready = kept; len(kept) == 0 {
		w.ready = nil
	}
	for _, msg := range s.msgs {
		w.bytes -= msg.size()
	}
	w.waiting -= len(s.msgs)
	slices.SortFunc(s.msgs, func(a, b *Message) int { return cmp.Compare(a.place, b.place) })
	if len(s.lines) > 0 {
		signal(w.wake) // there may be more
		signal(w.room)
	}
	return s
}

// postponed is what must wait of a share: messages, and the later ones of their lines, or everything.
type postponed struct {
	order Order
	waits map[*Message]time.Duration
	keys  map[string]bool
	all   bool
	pause time.Duration
}

func (p *postponed) add(msg *Message, n next) {
	p.waits[msg] = n.wait
	if n.pause {
		p.pause = n.wait
	}
	p.all = p.all || n.pause || p.order == OrderByPartition
	if p.order == OrderByKey && msg.Key != nil {
		p.keys[string(msg.Key)] = true
	}
}

// takes postpones a message that must wait for another one.
func (p *postponed) takes(msg *Message) bool {
	_, waits := p.waits[msg]
	if !waits && (p.all || msg.Key != nil && p.keys[string(msg.Key)]) {
		p.waits[msg], waits = 0, true
	}
	return waits
}

// done ends a share. What is postponed goes back to the front of its lines, which wait. It reports
// whether the share was the last one of due messages.
func (w *workers) done(s share, later *postponed) (last bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, from := range s.lines {
		from.taken = false
	}
	if later.pause > 0 {
		w.paused = time.Now().Add(later.pause)
	}
	waits := map[*line]time.Duration{}
	for _, msg := range slices.Backward(s.msgs) { // they are in the order of their offsets
		wait, back := later.waits[msg]
		if !back {
			w.open[msg.place-w.base].done = true
			continue
		}
		to := w.lineOf(msg)
		to.msgs, to.taken, waits[to] = slices.Insert(to.msgs, 0, msg), true, max(waits[to], wait)
		w.waiting++
		w.bytes += msg.size()
	}
	for _, from := range s.lines {
		w.offer(from)
	}
	for to, wait := range waits {
		time.AfterFunc(wait, func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			if to.taken = false; !w.ended {
				w.offer(to)
				signal(w.wake)
			}
		})
	}
	n := 0
	for ; n < len(w.open) && w.open[n].done; n++ {
		w.passed = w.open[n].passed
	}
	w.base += n
	if w.open = w.open[n:]; len(w.open) == 0 {
		w.open = nil
	}
	if len(s.dues) > 0 {
		w.retrying--
	}
	for _, d := range s.dues {
		delete(w.releasing, d.seq)
	}
	signal(w.wake)
	signal(w.room)
	return len(s.dues) > 0 && len(w.releasing) == 0
}

// end releases the messages, which timers of lines that wait would keep in memory.
func (w *workers) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range w.lines {
		l.msgs = nil
	}
	w.ended, w.lines, w.ready, w.open = true, nil, nil, nil
}

// low returns the offset up to which everything is done.
func (w *workers) low() passed {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.passed
}
