package consumer

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kgo"
)

// partition is one goroutine that handles the records of a partition in order, batch by batch, or hands them
// to workers.
type partition struct {
	session *session
	engine  *engine // the session's
	lane    *lane
	queue   *queue

	pos     *position
	current atomic.Pointer[position] // what the poller may read; pos is the worker's
	topicID uuid.UUID

	// What an operator and the lanes keep it from, for its state. The session's mutex guards them.
	paused bool
	lanes  map[*lane]laneState // but those that run

	cancel   context.CancelFunc
	stopping chan struct{} // closed: no further batch, no further attempt
	once     sync.Once
	done     chan struct{}

	during uint64        // this poll, and those before it, may bring what was fetched before the partition began
	looked chan struct{} // has room for one signal: parked messages are due
	idle   *time.Ticker

	lookedAt struct{ seen, end int64 } // by the watchdog, the last time
}

// idleEvery is how often a partition without messages stores that it is behind control records.
const idleEvery = 10 * time.Second

func newPartition(s *session, pos *position, topicID uuid.UUID) *partition {
	// The worker outlives the callback that started it, and the poll loop that feeds it: stop ends it.
	ctx, cancel := context.WithCancel(context.WithoutCancel(s.values))
	p := &partition{
		session: s, engine: s.engine, pos: pos, topicID: topicID, cancel: cancel, lanes: map[*lane]laneState{},
		stopping: make(chan struct{}), done: make(chan struct{}), looked: make(chan struct{}, 1),
	}
	p.queue = newQueue(s.client, pos.topic, pos.partition, s.engine.cfg.BatchMax)
	p.publish()
	p.lane = s.consumer.newLane(ctx, pos, p.stopping)
	p.lane.committed = func(last *Message, _ outcome) {
		p.publish()
		if last.row == 0 {
			p.mark(last.next())
		}
	}
	p.lane.regain = func(ctx context.Context) error { return s.rehold(ctx, p) }
	p.lane.restart = s.restart
	p.lane.noted = func(l *lane) { s.noteLane(p, l) }
	return p
}

// newLane makes the lane of a partition. After a takeover from a holder that ended without order, and without
// finishing anything, the messages that it may have died of are tried alone.
func (c *Consumer) newLane(ctx context.Context, pos *position, stopping <-chan struct{}) *lane {
	l := &lane{
		engine: c.engine, ctx: ctx, stopping: stopping, careful: &careful{}, does: laneState{state: StateRunning},
		scope: c.names[pos.topic], idSources: c.rules[pos.topic].Sources(),
		work:    work{consumer: c.ids[pos.topic], pos: pos, held: newHeldKeys(), form: newClaimForm()},
		breaker: newBreaker(c.engine.cfg.ParkShareMax),
	}
	if pos.stuck > 0 {
		l.careful.left.Store(int64(c.engine.cfg.BatchMax))
		if pos.stored != nil {
			l.careful.from = *pos.stored
		}
	}
	return l
}

// publish lets the poller, and others that look at the partition, see the position.
func (p *partition) publish() {
	now := *p.pos
	p.current.Store(&now)
}

// mark notes an offset that is to be committed to Kafka.
func (p *partition) mark(offset int64) { p.session.mark(p.pos.topic, p.pos.partition, offset) }

// messages makes messages of records from Kafka.
func (p *partition) messages(records []queued) []*Message {
	return p.lane.messages(p.session.consumer, records, p.topicID)
}

// messages makes messages of records, with what the lane's position says about them.
func (l *lane) messages(c *Consumer, records []queued, topicID uuid.UUID) []*Message {
	plain := make([]*kgo.Record, len(records))
	for i, r := range records {
		plain[i] = r.record
	}
	msgs := c.newMessages(l, plain, topicID)
	for i, msg := range msgs {
		msg.scope, msg.behind = l.scope, records[i].behind
		if msg.Offset < l.work.pos.keysFrom {
			msg.callTime = &msg.Time
		}
	}
	return msgs
}

func (p *partition) key() topicPartition { return topicPartition{p.queue.topic, p.queue.partition} }

func (p *partition) stop() { p.once.Do(func() { close(p.stopping) }) }

func (p *partition) run() {
	defer close(p.done)
	defer p.cancel()
	ended := false
	defer func() {
		if !ended { // a user's function ended the goroutine
			p.session.restart(errGoexit)
		}
	}()
	p.work()
	ended = true
}

func (p *partition) work() {
	for waits := 1; ; waits++ {
		err := p.lane.load(p.lane.ctx)
		if err == nil {
			break
		}
		if p.lane.stopped() || !p.lane.wait(waits, &failure{origin: originEngine, index: unknownIndex, err: err}) {
			return
		}
	}
	p.lane.become(StateRunning, nil)
	if p.lane.careful.left.Load() > 0 {
		p.lane.log(slog.LevelWarn, "the last holder of the partition ended without finishing anything: messages are tried alone for a while",
			"times", p.pos.stuck, "messages", p.engine.cfg.BatchMax)
	}
	p.idle = time.NewTicker(p.session.consumer.idleEvery)
	defer p.idle.Stop()
	if p.engine.cfg.Order == OrderByPartition {
		p.alone(p.lane.stopped)
		return
	}
	p.alone(func() bool { return p.lane.stopped() || p.lane.careful.left.Load() <= 0 })
	if !p.lane.stopped() {
		newFleet(p).run()
	}
}

// alone handles one batch after the other, and in between what operators hand back.
func (p *partition) alone(until func() bool) {
	for !until() {
		ok := true
		select {
		case <-p.looked:
			ok = p.release()
		default:
		}
		if batch := p.queue.pop(); ok && len(batch) > 0 {
			ok = p.lane.process(p.messages(batch))
		} else if ok {
			ok = p.rest()
		}
		if !ok {
			return
		}
	}
}

// rest waits for something to do.
func (p *partition) rest() bool {
	select {
	case <-p.stopping:
	case <-p.queue.arrived:
	case <-p.looked:
		return p.release()
	case <-p.idle.C:
		return p.advanceIdle()
	}
	return true
}

// release tries again what operators handed back and what waits behind it, one transaction of it. The poller asks for
// more while there is more. It returns false if the partition is to stop.
func (p *partition) release() bool {
	if p.queue.isHalted() {
		return true
	}
	list, err := p.lane.due(p.lane.ctx)
	if err == nil && len(list) > 0 {
		if err = p.lane.release(p.lane.ctx, list); err == nil {
			p.look() // there may be more
		}
	}
	if err != nil && !p.lane.stopped() {
		p.lane.said.warn(p.lane, "parked messages cannot be looked after; it is tried again", err)
	}
	return !p.lane.stopped()
}

// look asks for a release.
func (p *partition) look() {
	select {
	case p.looked <- struct{}{}:
	default:
	}
}

// advanceIdle stores that the partition is behind control records that no message follows. It returns false if the
// partition is to stop.
func (p *partition) advanceIdle() bool {
	behind, at := p.queue.behindControl()
	if behind == 0 || p.pos.stored != nil && *p.pos.stored >= behind {
		return true
	}
	return p.advance(passed{behind, at})
}

// advance stores a position outside of the transactions that handled the messages. It returns false if the partition
// is to stop.
func (p *partition) advance(to passed) bool {
	e := p.engine
	ctx, cancel := e.bounded(p.lane.ctx)
	defer cancel()
	var stored *int64
	err := e.pool.QueryRow(ctx, e.sql.advanceApart, e.cfg.Group, p.pos.topic, p.pos.partition, p.pos.epoch, p.pos.stored, to.behind, to.at, p.pos.server).Scan(&stored)
	f := &failure{origin: originEngine, index: unknownIndex, err: err}
	switch {
	case err == nil:
		p.lane.become(StateRunning, nil)
		p.pos.stored = stored
		p.publish()
		p.mark(to.behind)
		return true
	case errIsNoRows(err):
		f.err = errServerChanged
		return p.lane.takeBack(f)
	case e.verdict(f) == verdictFenced:
		return p.lane.takeBack(f)
	}
	return p.lane.stopped() || p.lane.wait(1, f) // not stored is only late
}
