package consumer

import (
	"cmp"
	"crypto/sha256"
	"slices"
	"sync"
	"time"
)

// workers handle the messages of one partition at the same time. With OrderByKey one of them at a
// time handles the messages of a key, in order. With OrderUnordered any free one handles the next
// message. The claims record what is done. The stored position follows the lowest message that is
// not done, so that after a crash no message is missed and few are redelivered.
type workers struct {
	partition *partition
	batchMax  int
	wake      chan struct{} // buffers one signal: something can be taken
	room      chan struct{} // buffers one signal: something was taken or done
	failed    chan struct{} // closed when a worker ended
	once      sync.Once

	mu        sync.Mutex
	lines     map[keyHash]*line  // of the keys that have messages waiting or in progress
	ready     []*line            // that may have messages to be taken, in the order in which they came
	waiting   int                // messages
	bytes     int                // of these
	paused    time.Time          // until then nothing is taken
	retrying  int                // workers that retry parked messages
	releasing map[int64]struct{} // parked messages that wait for a worker, or have one

	// In progress, in the order of their offsets: it does not wait for missing offsets (compacted,
	// aborted).
	open   []tracked
	base   int // number of the first one
	passed passed
}

// line is what waits for a worker: the messages of one key, or one without a key.
type line struct {
	hash  *keyHash // nil: no other message belongs to it
	msgs  []*Message
	dues  []due // parked messages, which come first
	taken bool  // a worker has it
}

// share is what a worker takes: messages, or one due parked message, and the lines that it holds.
type share struct {
	lines []*line
	msgs  []*Message
	due   due // seq 0: none
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

func newWorkers(p *partition, batchMax int) *workers {
	return &workers{
		partition: p, batchMax: batchMax, wake: make(chan struct{}, 1), room: make(chan struct{}, 1), failed: make(chan struct{}),
		lines: map[keyHash]*line{}, releasing: map[int64]struct{}{},
	}
}

func signal(to chan struct{}) {
	select {
	case to <- struct{}{}:
	default:
	}
}

func (w *workers) run(n int) {
	var running sync.WaitGroup
	for range n {
		lane := w.partition.lane.worker()
		running.Go(func() { w.work(lane) })
	}
	finished := w.dispatch(n)
	w.partition.stop()
	running.Wait()
	if w.partition.lane.ctx.Err() == nil {
		w.partition.ended = w.advance() && finished && w.partition.pos.next.Load() >= w.low().behind
	}
}

// worker returns another lane of the partition. It shares everything with this one except the state
// of a single transaction.
func (l *lane) worker() *lane {
	w := &lane{
		engine: l.engine, ctx: l.ctx, stopping: l.stopping, work: l.work, breaker: l.breaker, suspects: l.suspects, size: l.size,
		committed: l.committed, refused: l.refused, noted: l.noted, scope: l.scope, alias: l.alias, does: laneState{state: StateRunning},
	}
	w.work.apart, w.work.asks = true, newAsks()
	return w
}

// dispatch distributes messages until the partition must stop or a worker ended. While no message is
// in progress it does not wake up to store the position. It returns whether everything is done that
// Deliver got.
func (w *workers) dispatch(n int) (finished bool) {
	p := w.partition
	advance := time.NewTicker(advanceEvery)
	advance.Stop()
	defer advance.Stop()
	ticking := false
	for ok := true; ok; {
		for !w.full(n) {
			batch := alone(p.lane.messages(p.queue.pop(w.batchMax), p.topicID))
			if len(batch) == 0 {
				break
			}
			w.add(batch)
			if !ticking {
				ticking = true
				advance.Reset(advanceEvery)
			}
		}
		signal(w.wake) // the topic may have been resumed
		if p.finite && len(p.looked) == 0 && w.idle() && p.queue.empty() && !p.finish() {
			return p.ended
		}
		select {
		case <-p.queue.arrived:
		case <-w.room:
		case <-p.looked:
			ok = w.release()
		case <-advance.C:
			if ok = w.advance(); w.idle() && p.pos.next.Load() >= w.low().behind {
				ticking = false
				advance.Stop()
			}
		case <-p.idle.C:
			ok = !w.idle() || p.advanceIdle()
		case <-w.failed:
			return false
		case <-p.stopping:
			return false
		}
	}
	return false
}

// alone copies each message into its own memory: the client reads many records into one buffer, and
// a slow message must not keep that buffer alive.
func alone(msgs []*Message) []*Message {
	for i, msg := range msgs {
		own, record := *msg, *msg.record
		buffer := make([]byte, 0, msg.size())
		keep := func(b []byte) []byte {
			if b == nil {
				return nil
			}
			begin := len(buffer)
			buffer = append(buffer, b...)
			return buffer[begin:len(buffer):len(buffer)]
		}
		own.Key, own.Value = keep(msg.Key), keep(msg.Value)
		own.Headers, record.Headers = make([]Header, len(msg.Headers)), slices.Clone(record.Headers)
		for n, header := range msg.Headers {
			own.Headers[n] = Header{Name: header.Name, Value: keep(header.Value)}
			record.Headers[n].Value = own.Headers[n].Value
		}
		record.Key, record.Value = own.Key, own.Value
		own.record = &record
		msgs[i] = &own
	}
	return msgs
}

// line returns the line of a message; the caller holds the mutex.
func (w *workers) line(hash []byte, keyed bool) *line {
	if !keyed || w.partition.engine.cfg.Order == OrderUnordered {
		return &line{}
	}
	key := keyHash(hash)
	found := w.lines[key]
	if found == nil {
		found = &line{hash: &key}
		w.lines[key] = found
	}
	return found
}

func (w *workers) lineOf(msg *Message) *line {
	hash := sha256.Sum256(msg.Key)
	return w.line(hash[:], msg.Key != nil)
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
	case l.taken:
	case len(l.msgs)+len(l.dues) > 0:
		w.ready = append(w.ready, l)
	case l.hash != nil:
		delete(w.lines, *l.hash)
	}
}

// release gives parked messages that are due to the workers.
func (w *workers) release() bool {
	if w.partition.queue.isHalted() {
		return true
	}
	l := w.partition.lane
	list, err := l.due(l.ctx)
	if err != nil {
		l.warn("could not read due parked messages; will retry", err)
		return !l.stopped()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, d := range list {
		if _, under := w.releasing[d.seq]; under {
			continue
		}
		w.releasing[d.seq] = struct{}{}
		to := w.line(d.hash, d.hash != nil)
		to.dues = append(to.dues, d)
		w.offer(to)
	}
	signal(w.wake)
	return true
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

// take returns what a worker does next; without lines: nothing can be taken. It is a fair part of the
// waiting messages (what one of n workers takes, no other one can handle in parallel), or a parked
// message: retries get at most half of the workers.
func (w *workers) take(n, batch int) (s share) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Now().Before(w.paused) {
		return s
	}
	limit := min(max((w.waiting+n-1)/n, 1), batch)
	kept := w.ready[:0]
	for i, from := range w.ready {
		switch {
		case from.taken || len(from.msgs)+len(from.dues) == 0: // it was offered twice
			continue
		case s.due.seq != 0 || len(s.msgs) >= limit, len(from.dues) > 0 && (len(s.msgs) > 0 || w.retrying >= max(n/2, 1)):
			kept = append(kept, w.ready[i])
			continue
		case len(from.dues) > 0:
			s.due, from.dues = from.dues[0], from.dues[1:]
			w.retrying++
		default:
			some := min(limit-len(s.msgs), len(from.msgs))
			s.msgs = append(s.msgs, from.msgs[:some]...)
			from.msgs = slices.Clone(from.msgs[some:]) // the line must not keep finished messages alive
		}
		from.taken = true
		s.lines = append(s.lines, from)
	}
	clear(w.ready[len(kept):])
	if w.ready = kept; len(kept) == 0 {
		w.ready = nil
	}
	for _, msg := range s.msgs {
		w.bytes -= msg.size()
	}
	w.waiting -= len(s.msgs)
	slices.SortFunc(s.msgs, func(a, b *Message) int { return cmp.Compare(a.Offset, b.Offset) })
	if len(s.lines) > 0 {
		signal(w.wake) // there may be more
		signal(w.room)
	}
	return s
}

// postponed is what must wait of a share: messages, the later ones of their keys, or everything.
type postponed struct {
	waits map[*Message]time.Duration
	keys  map[string]bool
	pause time.Duration
}

func (p *postponed) add(msg *Message, n next, holdsKeys bool) {
	p.waits[msg] = n.wait
	if n.pause {
		p.pause = n.wait
	}
	if holdsKeys && msg.Key != nil {
		p.keys[string(msg.Key)] = true
	}
}

// takes postpones a message that must wait for another one.
func (p *postponed) takes(msg *Message) bool {
	_, waits := p.waits[msg]
	if !waits && (p.pause > 0 || msg.Key != nil && p.keys[string(msg.Key)]) {
		p.waits[msg], waits = 0, true
	}
	return waits
}

// done ends a share. What is postponed goes back to the front of its lines, which wait.
func (w *workers) done(s share, later *postponed) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, from := range s.lines {
		from.taken = false
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
			to.taken = false
			w.offer(to)
			signal(w.wake)
		})
	}
	if later.pause > 0 {
		w.paused = time.Now().Add(later.pause)
	}
	n := 0
	for ; n < len(w.open) && w.open[n].done; n++ {
		w.passed = w.open[n].passed
	}
	w.base += n
	if w.open = w.open[n:]; len(w.open) == 0 {
		w.open = nil
	}
	if s.due.seq != 0 {
		w.retrying--
		delete(w.releasing, s.due.seq)
	}
	signal(w.wake)
	signal(w.room)
}

// low returns the offset up to which everything is done.
func (w *workers) low() passed {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.passed
}

// work is one worker: it handles shares until the lane stops.
func (w *workers) work(l *lane) {
	defer w.once.Do(func() { close(w.failed) })
	for !l.stopped() {
		var next share
		if !w.partition.queue.isHalted() {
			next = w.take(l.engine.cfg.Workers, l.batch())
		}
		if len(next.lines) == 0 {
			select {
			case <-w.partition.stopping:
			case <-w.failed:
				return
			case <-w.wake:
			}
			continue
		}
		l.later = &postponed{waits: map[*Message]time.Duration{}, keys: map[string]bool{}}
		if next.due.seq != 0 {
			w.retry(l, next.due)
		} else if !l.process(next.msgs) {
			return
		}
		w.done(next, l.later)
	}
}

// retry retries a parked message, unless the topic is paused.
func (w *workers) retry(l *lane, d due) {
	if w.partition.queue.isHalted() {
		return
	}
	if err := l.release(l.ctx, []due{d}); err == nil {
		w.partition.requestRelease() // there may be more
	} else if !l.stopped() {
		l.warn("could not read due parked messages; will retry", err)
	}
}

// advance stores the offset up to which all messages are done. It returns false if the partition
// must stop.
func (w *workers) advance() bool {
	low := w.low()
	return low.behind <= w.partition.pos.next.Load() || low.behind == 0 || w.partition.advance(low)
}
