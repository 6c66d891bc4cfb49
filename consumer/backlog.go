package consumer

import (
	"cmp"
	"crypto/sha256"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// backlog is the messages of one partition that have arrived and are not done. Its lanes take them.
// With OrderByPartition there is one line of messages. With OrderByKey one lane at a time handles the
// messages of a key, in order. With OrderUnordered any free one handles the next message. The claims
// record what is done. The stored position follows the lowest message that is not done, so that after
// a crash no message is missed and few are redelivered.
type backlog struct {
	client   *kgo.Client // nil: the records do not come from Kafka
	key      topicPartition
	order    Order
	batchMax int
	wake     chan struct{} // buffers one signal: something can be taken
	turned   chan struct{} // buffers one signal: something is in progress, or nothing any more

	mu      sync.Mutex
	begin   int64     // earlier offsets come from an earlier fetch
	seen    int64     // offset after the last record that arrived, including control records
	seenAt  time.Time // time of that record
	fetches bool      // false: fetching is paused, because enough waits
	ended   bool      // fetching is no longer paused or resumed, and no later records are taken

	lines     map[keyHash]*line  // of the keys that have messages waiting or in progress
	ready     []*line            // that may have messages to be taken, in the order in which they came
	waiting   int                // messages
	bytes     int                // of these
	halted    bool               // by an operator: nothing is taken
	paused    time.Time          // the same, until then
	retrying  int                // lanes that retry parked messages
	releasing map[int64]struct{} // parked messages that wait for a lane, or have one

	// In progress, in the order of their offsets: it does not wait for missing offsets (compacted,
	// aborted).
	open   []tracked
	base   int // number of the first one
	passed tracked
}

// line is messages that wait for each other: of the partition, of a key, or one alone.
type line struct {
	hash  *keyHash // nil: no other message belongs to it
	msgs  []*Message
	dues  []due     // parked messages, which come first
	taken bool      // a lane has it
	ready bool      // it is in the list of lines that may have something
	until time.Time // it waits
}

// share is what a lane takes: messages, or due parked messages, and the lines that it holds.
type share struct {
	lines []*line
	msgs  []*Message
	dues  []due
}

// add takes messages of a line, up to the limit.
func (s *share) add(from *line, limit int) {
	n := min(limit-len(s.msgs), len(from.msgs))
	switch {
	case len(s.msgs) > 0 && (!s.msgs[0].first.IsZero() || !from.msgs[0].first.IsZero()):
		return
	case !from.msgs[0].first.IsZero():
		n = 1
	}
	s.msgs = append(s.msgs, from.msgs[:n]...)
	clear(from.msgs[:n]) // the array must not keep finished messages alive
	from.msgs = from.msgs[n:]
}

// retry takes due messages of a line, up to the limit.
func (s *share) retry(from *line, limit int) {
	n := 0
	for n < len(from.dues) && len(s.dues) < limit && (len(s.dues) == 0 || !from.dues[n].tried && !s.dues[0].tried) {
		s.dues = append(s.dues, from.dues[n])
		n++
	}
	from.dues = from.dues[n:]
}

// tracked is a message in progress, or one after it.
type tracked struct {
	next int64 // offset after it
	at   time.Time
	done bool
}

const (
	// advanceEvery is how often the position is stored.
	advanceEvery = 100 * time.Millisecond
	// trackedMax bounds how far work runs ahead of the slowest message. After a crash, messages that
	// were done ahead of it are redelivered, and dropped because of their claims.
	trackedMax = 200_000
	// A partition pauses fetching when these limits are reached, and resumes at half of them. A fetch
	// that begins while it is paused excludes it and may wait for other partitions, up to the client's
	// FetchMaxWait. The waiting messages must last that long.
	waitingBatchesMax = 20
	waitingBytesMax   = 16 << 20
)

func newBacklog(client *kgo.Client, key topicPartition, order Order, batchMax int) *backlog {
	return &backlog{
		client: client, key: key, order: order, batchMax: batchMax, wake: make(chan struct{}, 1), turned: make(chan struct{}, 1), fetches: true,
		lines: map[keyHash]*line{}, releasing: map[int64]struct{}{},
	}
}

func signal(to chan struct{}) {
	select {
	case to <- struct{}{}:
	default:
	}
}

// start sets the offset at which the first record is expected.
func (b *backlog) start(offset int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.begin, b.seen = offset, offset
}

// arrive adds records, which follow all that arrived before.
func (b *backlog) arrive(records []*kgo.Record, convert func(records []*kgo.Record) []*Message) {
	if len(records) == 0 || records[len(records)-1].Offset < b.begin {
		return
	}
	last := records[len(records)-1]
	msgs := convert(slices.DeleteFunc(records, func(r *kgo.Record) bool { return r.Offset < b.begin || r.Attrs.IsControl() }))
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ended {
		return
	}
	b.seen, b.seenAt = last.Offset+1, recordTime(last)
	for _, msg := range msgs {
		b.add(msg)
	}
	signal(b.wake)
	signal(b.turned)
	b.fetch()
}

// add adds a message behind the others.
func (b *backlog) add(msg *Message) {
	msg.place = b.base + len(b.open)
	b.open = append(b.open, tracked{next: msg.Offset + 1, at: msg.Time})
	to := b.lineOf(msg)
	to.msgs = append(to.msgs, msg)
	b.offer(to)
	b.waiting++
	b.bytes += msg.size()
}

// fetch pauses fetching when enough messages wait, and resumes it later. That happens under the lock:
// otherwise a pause could take effect after a later resume, and fetching would stop forever.
func (b *backlog) fetch() {
	if b.client == nil || b.ended {
		return
	}
	list := map[string][]int32{b.key.topic: {b.key.partition}}
	most := waitingBatchesMax * b.batchMax
	switch {
	case b.fetches && (b.waiting >= most || b.bytes >= waitingBytesMax || len(b.open) >= trackedMax):
		b.fetches = false
		b.client.PauseFetchPartitions(list)
	case !b.fetches && b.waiting < most/2 && b.bytes < waitingBytesMax/2 && len(b.open) < trackedMax:
		b.fetches = true
		b.client.ResumeFetchPartitions(list)
	}
}

// line returns the line of a key; the caller holds the mutex.
func (b *backlog) line(hash []byte) *line {
	if hash == nil || b.order == OrderUnordered {
		return &line{}
	}
	found := b.lines[keyHash(hash)]
	if found == nil {
		key := keyHash(hash)
		found = &line{hash: &key}
		b.lines[key] = found
	}
	return found
}

func (b *backlog) lineOf(msg *Message) *line {
	switch {
	case b.order == OrderByPartition:
		return b.line(make([]byte, sha256.Size)) // of the partition; parked messages have lines of their own
	case msg.Key == nil || b.order == OrderUnordered:
		return b.line(nil)
	}
	hash := sha256.Sum256(msg.Key)
	return b.line(hash[:])
}

// offer makes a line available, if it has something.
func (b *backlog) offer(l *line) {
	switch {
	case l.taken, l.ready:
	case len(l.msgs)+len(l.dues) > 0:
		l.ready = true
		b.ready = append(b.ready, l)
	case l.hash != nil:
		delete(b.lines, *l.hash)
	}
}

// release adds parked messages that are due.
func (b *backlog) release(list []due) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, d := range list {
		if _, under := b.releasing[d.seq]; under {
			continue
		}
		b.releasing[d.seq] = struct{}{}
		to := b.line(d.hash)
		to.dues = append(to.dues, d)
		b.offer(to)
	}
	signal(b.wake)
}

// idle reports whether nothing waits and nothing is in progress.
func (b *backlog) idle() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.open) == 0 && len(b.releasing) == 0
}

// take returns what a lane does next; without lines: nothing can be taken. It is a fair part of the
// waiting messages (what one of n lanes takes, no other one can handle in parallel), or of the parked
// messages that are due: retries get at most half of the lanes. What was tried before is tried alone.
func (b *backlog) take(n, batch int) (s share) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	if b.halted || now.Before(b.paused) {
		return s
	}
	part := func(all int) int { return min(max((all+n-1)/n, 1), batch) }
	ready := 0
	for _, from := range b.ready {
		if !now.Before(from.until) {
			ready += len(from.msgs)
		}
	}
	limit, limitDues := part(ready), part(len(b.releasing))
	kept := b.ready[:0]
	for _, from := range b.ready {
		before := len(s.msgs) + len(s.dues)
		switch {
		case now.Before(from.until):
		case len(from.dues) > 0:
			if len(s.msgs) == 0 && (len(s.dues) > 0 || b.retrying < max(n/2, 1)) {
				s.retry(from, limitDues)
			}
		case len(s.dues) == 0:
			s.add(from, limit)
		}
		if len(s.msgs)+len(s.dues) == before {
			kept = append(kept, from)
			continue
		}
		from.taken, from.ready = true, false
		s.lines = append(s.lines, from)
	}
	if len(s.dues) > 0 {
		b.retrying++
	}
	clear(b.ready[len(kept):])
	if b.ready = kept; len(kept) == 0 {
		b.ready = nil
	}
	for _, msg := range s.msgs {
		b.bytes -= msg.size()
	}
	b.waiting -= len(s.msgs)
	slices.SortFunc(s.msgs, func(a, c *Message) int { return cmp.Compare(a.place, c.place) })
	if len(s.lines) > 0 {
		signal(b.wake) // there may be more
		b.fetch()
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

// add postpones a message. One that was parked waits there, and others of the share only for its key.
func (p *postponed) add(msg *Message, n next) {
	p.waits[msg] = n.wait
	if n.pause {
		p.pause = n.wait
	}
	p.all = p.all || n.pause || p.order == OrderByPartition && msg.row == 0
	if p.order != OrderUnordered && msg.Key != nil {
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
func (b *backlog) done(s share, later *postponed) (last bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, from := range s.lines {
		from.taken = false
	}
	now, wake := time.Now(), b.wake // timers keep no messages alive
	if until := now.Add(later.pause); until.After(b.paused) {
		b.paused = until
	}
	for _, msg := range slices.Backward(s.msgs) { // they are in the order of their offsets
		wait, back := later.waits[msg]
		if !back {
			b.open[msg.place-b.base].done = true
			continue
		}
		to := b.lineOf(msg)
		to.msgs = slices.Insert(to.msgs, 0, msg)
		if until := now.Add(wait); wait > 0 && until.After(to.until) {
			to.until = until
			time.AfterFunc(wait, func() { signal(wake) })
		}
		b.offer(to)
		b.waiting++
		b.bytes += msg.size()
	}
	for _, from := range s.lines {
		b.offer(from)
	}
	n := 0
	for ; n < len(b.open) && b.open[n].done; n++ {
		b.passed = b.open[n]
	}
	b.base += n
	if b.open = b.open[n:]; len(b.open) == 0 {
		b.open = nil
	}
	if len(s.dues) > 0 {
		b.retrying--
	}
	for _, d := range s.dues {
		delete(b.releasing, d.seq)
	}
	signal(b.wake)
	signal(b.turned)
	b.fetch()
	return len(s.dues) > 0 && len(b.releasing) == 0
}

// low returns the offset up to which everything is done, and the time of the record before it; 0: nothing
// yet. Control records count as done when no message is in progress.
func (b *backlog) low() (int64, time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.open) == 0 && !b.seenAt.IsZero() {
		return b.seen, b.seenAt
	}
	return b.passed.next, b.passed.at
}

// end leaves the fetching of the partition to others. What has arrived can be taken.
func (b *backlog) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ended = true
}

// halt stops or resumes take. It reports whether that changed anything.
func (b *backlog) halt(halted bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	changed := b.halted != halted
	b.halted = halted
	signal(b.wake)
	return changed
}
