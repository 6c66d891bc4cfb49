package consumer

import (
	"context"
	"errors"
	"hash/maphash"
	"sync"
	"time"
)

// fleet handles the messages of one partition with several workers at a time. The messages of a key go to
// one worker, in order, or each to whoever is free. The claims say what is done; the stored position follows
// the lowest message that is not, so that nothing is left out after a crash and only little comes again.
type fleet struct {
	partition *partition
	queues    []chan *Message
	seed      maphash.Seed
	workers   sync.WaitGroup
	failed    chan struct{} // closed when a worker ended
	once      sync.Once
	track     tracker
	stored    *Message // the last message that the stored position is behind
}

// advanceEvery is how often the position is stored.
const advanceEvery = 100 * time.Millisecond

func newFleet(p *partition) *fleet {
	f := &fleet{partition: p, seed: maphash.MakeSeed(), failed: make(chan struct{})}
	n := p.session.consumer.engine.cfg.Workers
	if p.session.consumer.engine.cfg.Order == OrderUnordered {
		n = 1 // one queue, from which all take
	}
	for range n {
		f.queues = append(f.queues, make(chan *Message, 2*p.session.consumer.engine.cfg.BatchMax))
	}
	return f
}

func (f *fleet) run() {
	// A position that went back, or is somebody else's, is no matter of one worker.
	f.partition.lane.rehold = func(context.Context) error { return errWentBack }
	for i := range f.partition.session.consumer.engine.cfg.Workers {
		lane := *f.partition.lane
		lane.work.apart, lane.committed = true, func(*Message, outcome) {}
		f.workers.Go(func() { f.work(&lane, f.queues[i%len(f.queues)]) })
	}
	f.dispatch()
	f.workers.Wait()
	if f.partition.lane.ctx.Err() == nil {
		f.advance()
	}
}

// dispatch hands out messages until the partition is to stop or a worker ended.
func (f *fleet) dispatch() {
	advance, tend := time.NewTicker(advanceEvery), time.NewTicker(tendEvery)
	defer advance.Stop()
	defer tend.Stop()
	var batch []*Message
	for due := false; ; {
		if len(batch) == 0 {
			if due {
				if !f.look() {
					return
				}
				due = false
			}
			batch = f.partition.session.consumer.newMessages(f.partition.pop(), f.partition.topicID)
			f.track.add(batch)
		}
		var queue chan<- *Message // nil, which never takes, where there is nothing to hand out
		var next *Message
		if len(batch) > 0 {
			next = batch[0]
			queue = f.queueOf(next)
		}
		select {
		case queue <- next:
			batch = batch[1:]
		case <-f.partition.arrived:
		case <-advance.C:
			if !f.advance() {
				return
			}
		case <-tend.C:
			due = true
		case <-f.failed:
			return
		case <-f.partition.stopping:
			return
		}
	}
}

func (f *fleet) queueOf(msg *Message) chan *Message {
	if len(f.queues) == 1 || msg.Key == nil {
		// Without a key there is no order: the offset spreads them.
		return f.queues[int(msg.Offset)%len(f.queues)]
	}
	return f.queues[maphash.Bytes(f.seed, msg.Key)%uint64(len(f.queues))]
}

// work is one worker.
func (f *fleet) work(l *lane, queue <-chan *Message) {
	defer f.once.Do(func() { close(f.failed) })
	msgs := make([]*Message, 0, f.partition.session.consumer.engine.cfg.BatchMax)
	for {
		select {
		case <-f.partition.stopping:
			return
		case <-f.failed:
			return
		case msg := <-queue:
			msgs = append(msgs[:0], msg)
		}
	collect:
		for len(msgs) < f.partition.session.consumer.engine.cfg.BatchMax {
			select {
			case msg := <-queue:
				msgs = append(msgs, msg)
			default:
				break collect
			}
		}
		if !l.process(msgs) {
			return
		}
		f.track.done(msgs)
	}
}

// advance stores how far everything is done. It returns false if the partition is to stop.
func (f *fleet) advance() bool {
	last := f.track.low()
	if last == nil || last == f.stored {
		return true
	}
	ctx, cancel := context.WithTimeout(f.partition.lane.ctx, takeOverMax)
	defer cancel()
	var stored int64
	err := f.partition.session.consumer.engine.pool.QueryRow(ctx, f.partition.session.consumer.engine.sql.advance, f.partition.session.consumer.engine.cfg.Group, f.partition.pos.topic, f.partition.pos.partition, f.partition.pos.epoch, f.partition.pos.stored, last.Offset+1, last.Time).Scan(&stored)
	if err != nil {
		// Not stored is only late, unless the position is not ours any more.
		return f.partition.lane.waitOut(1, wrapPosition(err))
	}
	f.stored, f.partition.pos.stored = last, &stored
	f.partition.mark(last)
	return true
}

// look looks after parked messages. Whatever has to be done is done while no worker is at work, so that the
// messages of a key stay in order.
func (f *fleet) look() bool {
	if err := f.partition.lane.inPlace(f.partition.lane.ctx); errors.Is(err, errWentBack) {
		f.partition.session.restart(err)
		return false
	}
	h, err := f.partition.lane.heads(f.partition.lane.ctx)
	if err != nil {
		return f.partition.lane.waitOut(1, err)
	}
	quiet := !h.due
	for _, key := range f.partition.lane.work.held.list() {
		if _, held := h.held[keyHash(key)]; !held {
			quiet = false
		}
	}
	if quiet {
		f.partition.lane.work.held.add(h.held)
		return true
	}
	for !f.track.idle() {
		select {
		case <-f.track.emptied():
		case <-f.failed:
			return false
		case <-f.partition.stopping:
			return false
		}
	}
	for f.partition.tend() {
		if f.partition.lane.stopped() {
			return false
		}
	}
	return true
}
