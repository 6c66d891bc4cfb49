package consumer

import (
	"context"
	"crypto/sha256"
	"hash/maphash"
	"slices"
	"sync"
	"time"
)

// fleet handles the messages of one partition with several workers at a time. The messages of a key go to
// one worker, in order, or each to whichever is free. The claims say what is done; the stored position follows
// the lowest message that is not, so that nothing is left out after a crash and only little comes again.
type fleet struct {
	partition *partition
	queues    []chan task
	seed      maphash.Seed
	workers   sync.WaitGroup
	failed    chan struct{} // closed when a worker ended
	once      sync.Once
	track     tracker
	stored    int64 // the position that is stored, or 0

	mu        sync.Mutex
	releasing map[int64]struct{} // parked messages that are handed to a worker
}

// task is what a worker does next: a message, or parked messages of one key that are due. What has one key is done by
// one worker, so a key that is retried waits for itself alone.
type task struct {
	msg *Message
	due due
}

// advanceEvery is how often the position is stored.
const advanceEvery = 100 * time.Millisecond

func newFleet(p *partition) *fleet {
	cfg := &p.session.consumer.engine.cfg
	f := &fleet{partition: p, seed: maphash.MakeSeed(), failed: make(chan struct{}), releasing: map[int64]struct{}{}}
	n := cfg.Workers
	if cfg.Order == OrderUnordered {
		n = 1 // one queue, from which all take
	}
	for range n {
		f.queues = append(f.queues, make(chan task, 2*cfg.BatchMax))
	}
	return f
}

func (f *fleet) run() {
	cfg := &f.partition.session.consumer.engine.cfg
	// A position that went back, or has another holder, concerns all workers.
	f.partition.lane.regain = func(context.Context) error { return errWentBack }
	for i := range cfg.Workers {
		lane := f.partition.lane.worker()
		f.workers.Go(func() { f.work(lane, f.queues[i%len(f.queues)]) })
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

// dispatch hands out messages until the partition is to stop or a worker ended.
func (f *fleet) dispatch() {
	p := f.partition
	advance := time.NewTicker(advanceEvery)
	defer advance.Stop()
	var batch []*Message
	for {
		if len(batch) == 0 && !f.track.full() {
			batch = alone(p.messages(p.queue.pop()))
			f.track.add(batch)
		}
		var to chan<- task // nil, which never takes, where there is nothing to hand out
		var next task
		if len(batch) > 0 {
			next = task{msg: batch[0]}
			to = f.queueOf(batch[0].Key, batch[0].Offset)
		}
		ok := true
		select {
		case to <- next:
			batch = batch[1:]
		case <-p.queue.arrived:
		case <-p.looked:
			ok = f.release()
		case <-advance.C:
			ok = f.advance()
		case <-p.idle.C:
			ok = !f.track.idle() || len(batch) > 0 || p.advanceIdle()
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

// alone gives each message an allocation of its own: one that is slow must not keep those that arrived with it.
func alone(msgs []*Message) []*Message {
	for i, msg := range msgs {
		own := *msg
		own.Headers = slices.Clone(msg.Headers)
		msgs[i] = &own
	}
	return msgs
}

// queueOf chooses the worker of a key. Without a key there is no order: the offset spreads them.
func (f *fleet) queueOf(key []byte, offset int64) chan task {
	if len(f.queues) == 1 || key == nil {
		return f.queues[int(offset)%len(f.queues)]
	}
	hash := sha256.Sum256(key)
	return f.queueOfHash(hash[:])
}

func (f *fleet) queueOfHash(hash []byte) chan task {
	return f.queues[maphash.Bytes(f.seed, hash)%uint64(len(f.queues))]
}

// release hands parked messages that are due to the workers of their keys.
func (f *fleet) release() bool {
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
		to := f.queues[int(d.seq)%len(f.queues)]
		if d.hash != nil {
			to = f.queueOfHash(d.hash)
		}
		select {
		case to <- task{due: d}:
		case <-f.failed:
			return false
		case <-f.partition.stopping:
			return false
		}
	}
	return true
}

// work is one worker.
func (f *fleet) work(l *lane, tasks <-chan task) {
	defer f.once.Do(func() { close(f.failed) })
	batchMax := f.partition.session.consumer.engine.cfg.BatchMax
	msgs := make([]*Message, 0, batchMax)
	for {
		var next task
		select {
		case <-f.partition.stopping:
			return
		case <-f.failed:
			return
		case next = <-tasks:
		}
		msgs = msgs[:0]
		for collecting := next.msg != nil; collecting; {
			msgs = append(msgs, next.msg)
			next = task{}
			if len(msgs) == batchMax {
				break
			}
			select {
			case next = <-tasks:
				collecting = next.msg != nil
			default:
				collecting = false
			}
		}
		if len(msgs) > 0 && !f.handle(l, msgs) || next.due.seq != 0 && !f.retry(l, next.due) {
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

// retry tries parked messages of one key again.
func (f *fleet) retry(l *lane, d due) bool {
	l.work.pos = f.partition.current.Load()
	err := l.release(l.ctx, []due{d})
	f.mu.Lock()
	delete(f.releasing, d.seq)
	f.mu.Unlock()
	if err != nil && !l.stopped() {
		l.said.warn(l, "parked messages cannot be looked after; it is tried again", err)
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
