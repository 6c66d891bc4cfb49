package consumer

import (
	"context"
	"crypto/sha256"
	"slices"
	"sync"
	"time"
)

// fleet handles the messages of one partition with several workers at a time. The messages of a key are done by one
// worker at a time, in order, or each by whichever is free. The claims say what is done; the stored position follows
// the lowest message that is not, so that nothing is left out after a crash and only little comes again.
type fleet struct {
	partition *partition
	lines     *lines
	workers   sync.WaitGroup
	failed    chan struct{} // closed when a worker ended
	once      sync.Once
	track     tracker
	stored    int64 // the position that is stored, or 0

	mu        sync.Mutex
	releasing map[int64]struct{} // parked messages that are handed to a worker
}

// advanceEvery is how often the position is stored.
const advanceEvery = 100 * time.Millisecond

func newFleet(p *partition) *fleet {
	cfg := &p.engine.cfg
	return &fleet{partition: p, lines: newLines(cfg.Workers, cfg.BatchMax), failed: make(chan struct{}), releasing: map[int64]struct{}{}}
}

func (f *fleet) run() {
	cfg := &f.partition.engine.cfg
	// A position that went back, or has another holder, concerns all workers.
	f.partition.lane.regain = func(context.Context) error { return errWentBack }
	for range cfg.Workers {
		lane := f.partition.lane.worker()
		f.workers.Go(func() { f.work(lane) })
	}
	f.dispatch()
	f.workers.Wait()
	if f.partition.lane.ctx.Err() == nil {
		f.advance()
	}
}

// worker is a lane beside this one: it shares all but what one transaction needs for itself.
func (l *lane) worker() *lane {
	w := &lane{
		engine: l.engine, ctx: l.ctx, stopping: l.stopping, work: l.work, scope: l.scope, idSources: l.idSources, breaker: l.breaker, careful: l.careful,
		tried: l.tried, committed: func(*Message, outcome) {}, regain: l.regain, restart: l.restart, noted: l.noted, does: laneState{state: StateRunning},
	}
	w.work.apart, w.work.form = true, newClaimForm()
	return w
}

// dispatch hands out messages until the partition is to stop or a worker ended. While nothing is in work it does not
// wake up for the position.
func (f *fleet) dispatch() {
	p := f.partition
	advance := time.NewTicker(advanceEvery)
	advance.Stop()
	defer advance.Stop()
	ticking := false
	for {
		for !f.lines.full() && !f.track.full() {
			batch := alone(p.messages(p.queue.pop()))
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
			return
		case <-p.stopping:
			return
		}
		if !ok {
			return
		}
	}
}

// alone gives each message memory of its own: one that is slow must not keep those that arrived with it. What a client
// read lies in one buffer for many records.
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

// line is the key of a message; nil: it has none, or no order is wanted.
func (f *fleet) line(msg *Message) *keyHash {
	if msg.Key == nil || f.partition.engine.cfg.Order == OrderUnordered {
		return nil
	}
	hash := keyHash(sha256.Sum256(msg.Key))
	return &hash
}

// release hands parked messages that are due to the workers.
func (f *fleet) release() bool {
	if f.partition.queue.isHalted() {
		return true
	}
	l := f.partition.lane
	list, err := l.due(l.ctx)
	if err != nil {
		l.said.warn(l, "parked messages cannot be looked after; it is tried again", err)
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

// work is one worker.
func (f *fleet) work(l *lane) {
	defer f.once.Do(func() { close(f.failed) })
	for !l.stopped() {
		var next share
		if !f.partition.queue.isHalted() {
			next = f.lines.take()
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

// handle brings messages to their end. The position that the transaction makes sure of is the one that is stored.
func (f *fleet) handle(l *lane, msgs []*Message) bool {
	l.work.pos = f.partition.current.Load()
	if !l.process(msgs) {
		return false
	}
	f.track.done(msgs)
	return true
}

// retry tries parked messages of one key again, unless the topic was paused meanwhile.
func (f *fleet) retry(l *lane, d due) bool {
	var err error
	if !f.partition.queue.isHalted() {
		l.work.pos = f.partition.current.Load()
		err = l.release(l.ctx, []due{d})
	}
	f.mu.Lock()
	delete(f.releasing, d.seq)
	last := len(f.releasing) == 0
	f.mu.Unlock()
	if err != nil && !l.stopped() {
		l.said.warn(l, "parked messages cannot be looked after; it is tried again", err)
	}
	if err == nil && last {
		f.partition.look() // there may be more
	}
	return !l.stopped()
}

// advance stores how far everything is done. It returns false if the partition is to stop.
func (f *fleet) advance() bool {
	low := f.track.low()
	if low.behind == f.stored || low.behind == 0 {
		return true
	}
	if !f.partition.advance(low) {
		return false
	}
	if f.partition.pos.stored != nil && *f.partition.pos.stored >= low.behind {
		f.stored = low.behind
	}
	return true
}
