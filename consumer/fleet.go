package consumer

import (
	"crypto/sha256"
	"slices"
	"sync"
	"time"
)

// fleet handles the messages of one partition with several workers. With OrderByKey one worker at a
// time handles the messages of a key, in order. With OrderUnordered any free worker handles the
// next message. The claims record what is done. The stored position follows the lowest message that
// is not done, so that after a crash no message is missed and few are redelivered.
type fleet struct {
	partition *partition
	lines     *lines
	workers   sync.WaitGroup
	failed    chan struct{} // closed when a worker ended
	once      sync.Once
	track     tracker
	stored    int64 // the position that is stored, or 0

	mu        sync.Mutex
	releasing map[int64]struct{} // parked messages that were given to a worker
}

// advanceEvery is how often the position is stored.
const advanceEvery = 100 * time.Millisecond

func newFleet(p *partition) *fleet {
	cfg := &p.engine.cfg
	return &fleet{partition: p, lines: newLines(cfg.Workers, cfg.BatchMax), failed: make(chan struct{}), releasing: map[int64]struct{}{}}
}

func (f *fleet) runWorkers() {
	cfg := &f.partition.engine.cfg
	for range cfg.Workers {
		lane := f.partition.lane.worker()
		f.workers.Go(func() { f.runWorker(lane) })
	}
	finished := f.dispatch()
	f.partition.stop()
	f.workers.Wait()
	if f.partition.lane.ctx.Err() == nil {
		f.partition.ended = f.advance() && finished
	}
}

// worker returns another lane of the partition. It shares everything with this one except the state
// of a single transaction.
func (l *lane) worker() *lane {
	w := &lane{
		engine: l.engine, ctx: l.ctx, stopping: l.stopping, work: l.work, breaker: l.breaker, size: l.size,
		committed: l.committed, refused: l.refused, noted: l.noted, scope: l.scope, alias: l.alias, does: laneState{state: StateRunning},
	}
	w.work.apart, w.work.asks = true, newAsks()
	return w
}

// dispatch distributes messages to workers until the partition must stop or a worker ended. While
// no message is in progress it does not wake up to store the position. It returns whether everything
// is done that Deliver got.
func (f *fleet) dispatch() (finished bool) {
	p := f.partition
	advance := time.NewTicker(advanceEvery)
	advance.Stop()
	defer advance.Stop()
	ticking := false
	for {
		for !f.lines.full() && !f.track.full() {
			batch := alone(p.lane.messages(p.queue.pop(p.queue.batchMax), p.topicID))
			if len(batch) == 0 {
				break
			}
			f.track.add(batch)
			f.lines.put(batch, f.line)
			if !ticking {
				ticking = true
				advance.Reset(advanceEvery)
			}
		}
		signal(f.lines.wake) // the topic may have been resumed
		if p.finite && len(p.looked) == 0 && f.isIdle() && !p.finish() {
			return p.ended
		}
		ok := true
		select {
		case <-p.queue.arrived:
		case <-f.lines.room:
		case <-p.looked:
			ok = f.release()
		case <-advance.C:
			if ok = f.advance(); f.track.idle() && f.stored == f.track.low().behind {
				ticking = false
				advance.Stop()
			}
		case <-p.idle.C:
			ok = !f.track.idle() || p.advanceIdle()
		case <-f.failed:
			return false
		case <-p.stopping:
			return false
		}
		if !ok {
			return false
		}
	}
}

// isIdle reports whether nothing waits and nothing is in progress.
func (f *fleet) isIdle() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.releasing) == 0 && f.track.idle() && f.partition.queue.empty()
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

// line returns the hash of a message's key; nil: it has no key, or the order does not matter.
func (f *fleet) line(msg *Message) *keyHash {
	if msg.Key == nil || f.partition.engine.cfg.Order == OrderUnordered {
		return nil
	}
	hash := keyHash(sha256.Sum256(msg.Key))
	return &hash
}

// release gives parked messages that are due to the workers.
func (f *fleet) release() bool {
	if f.partition.queue.isHalted() {
		return true
	}
	l := f.partition.lane
	list, err := l.due(l.ctx)
	if err != nil {
		l.said.warn(l, "could not read due parked messages; will retry", err)
		return !l.stopped()
	}
	for _, d := range list {
		f.mu.Lock()
		_, under := f.releasing[d.seq]
		f.releasing[d.seq] = struct{}{}
		f.mu.Unlock()
		if under {
			continue
		}
		var hash *keyHash
		if d.hash != nil && l.engine.cfg.Order != OrderUnordered {
			key := keyHash(d.hash)
			hash = &key
		}
		f.lines.retry(d, hash)
	}
	return true
}

// runWorker is one worker: it executes batches of the partition until the lane stops.
func (f *fleet) runWorker(l *lane) {
	defer f.once.Do(func() { close(f.failed) })
	for !l.stopped() {
		var next share
		if !f.partition.queue.isHalted() {
			next = f.lines.next(l.batch())
		}
		if len(next.lines) == 0 {
			select {
			case <-f.partition.stopping:
			case <-f.failed:
				return
			case <-f.lines.wake:
			}
			continue
		}
		var ok bool
		if next.due.seq != 0 {
			ok = f.retry(l, next.due)
		} else {
			ok = f.handle(l, next.msgs)
		}
		f.lines.done(next)
		if !ok {
			return
		}
	}
}

// handle handles or parks messages, or postpones them.
func (f *fleet) handle(l *lane, msgs []*Message) bool {
	later := map[*Message]bool{}
	l.postpone = func(own []*Message, wait time.Duration, pause bool) {
		for _, msg := range own {
			later[msg] = true
		}
		f.lines.postpone(own, f.line, wait, pause)
	}
	if !l.process(msgs) {
		return false
	}
	f.track.done(slices.DeleteFunc(msgs, func(msg *Message) bool { return later[msg] }))
	return true
}

// retry retries parked messages of one key, unless the topic is paused.
func (f *fleet) retry(l *lane, d due) bool {
	var err error
	if !f.partition.queue.isHalted() {
		err = l.release(l.ctx, []due{d})
	}
	f.mu.Lock()
	delete(f.releasing, d.seq)
	last := len(f.releasing) == 0
	f.mu.Unlock()
	if err != nil && !l.stopped() {
		l.said.warn(l, "could not read due parked messages; will retry", err)
	}
	if err == nil && last {
		f.partition.requestRelease() // there may be more
	}
	return !l.stopped()
}

// advance stores the offset up to which all messages are done. It returns false if the partition
// must stop.
func (f *fleet) advance() bool {
	low := f.track.low()
	if low.behind == f.stored || low.behind == 0 {
		return true
	}
	if !f.partition.advance(low) {
		return false
	}
	if f.partition.pos.next.Load() >= low.behind {
		f.stored = low.behind
	}
	return true
}
