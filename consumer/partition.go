package consumer

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// partition is one goroutine that handles the records of a partition in order, batch by batch, or
// passes them to workers.
type partition struct {
	session *session
	engine  *engine // the session's
	lane    *lane
	queue   *queue

	pos     *position
	current atomic.Pointer[position] // a copy for the poller; only the worker uses pos
	topicID uuid.UUID

	// For the partition's state: whether an operator paused it, and the lanes that do not run.
	// Guarded by the session's mutex.
	paused bool
	lanes  map[any]laneState // of lanes that do not run, and of messages that block; by lane or message

	cancel   context.CancelFunc
	stopping chan struct{} // closed: no further batch, no further attempt
	once     sync.Once
	done     chan struct{}

	during uint64        // this poll, and earlier ones, may return records that were fetched before the partition began
	looked chan struct{} // buffers one signal: parked messages are due
	idle   *time.Ticker

	lookedAt struct{ seen, end int64 } // what the watchdog saw last
}

// idleEvery is how often a partition without messages stores a position after control records.
const idleEvery = 10 * time.Second

func newPartition(s *session, pos *position, topicID uuid.UUID) *partition {
	// The worker outlives the callback that started it and the poll loop that feeds it. stop ends
	// it.
	ctx, cancel := context.WithCancel(context.WithoutCancel(s.values))
	p := &partition{
		session: s, engine: s.engine, pos: pos, topicID: topicID, cancel: cancel, lanes: map[any]laneState{},
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
	p.lane.noted = func(who any, does laneState) { s.noteLane(p, who, does) }
	return p
}

// newLane returns the lane of a partition. If the last holder ended without a clean release and
// without finishing any message, the messages that it may have been handling are suspects.
func (c *Consumer) newLane(ctx context.Context, pos *position, stopping <-chan struct{}) *lane {
	cfg := &c.engine.cfg
	l := &lane{
		engine: c.engine, ctx: ctx, stopping: stopping, does: laneState{state: StateRunning}, size: min(batchBegins, cfg.BatchMax),
		scope: c.names[pos.topic], alias: cfg.alias(pos.topic), idSources: c.rules[pos.topic].Sources(),
		work:    work{consumer: c.ids[pos.topic], pos: pos, held: newHeldKeys(), asks: newAsks()},
		breaker: newBreaker(cfg.ParkShareMax),
	}
	if pos.stuck > 0 && cfg.OnFailure != OnFailureBlock {
		l.suspects = l.size * cfg.Workers
		l.log(slog.LevelWarn, "the last holder of the partition ended without finishing anything: the first messages are tried alone", "times", pos.stuck, "messages", l.suspects)
	}
	return l
}

// publish makes the position visible to the poller and to other readers.
func (p *partition) publish() {
	now := *p.pos
	p.current.Store(&now)
}

// mark records an offset to be committed to Kafka.
func (p *partition) mark(offset int64) { p.session.mark(p.pos.topic, p.pos.partition, offset) }

func (p *partition) key() topicPartition { return topicPartition{p.queue.topic, p.queue.partition} }

func (p *partition) stop() { p.once.Do(func() { close(p.stopping) }) }

func (p *partition) handleUntilStopped() {
	defer close(p.done)
	defer p.cancel()
	ended := false
	defer func() {
		if !ended { // a user's function ended the goroutine
			p.session.restart(errGoexit)
		}
	}()
	p.consume()
	ended = true
}

func (p *partition) consume() {
	for waits := 1; ; waits++ {
		err := p.lane.loadHeld(p.lane.ctx)
		if err == nil {
			break
		}
		if p.lane.stopped() || !p.lane.wait(waits, engineFailure(err)) {
			return
		}
	}
	p.lane.become(StateRunning, nil)
	p.idle = time.NewTicker(p.session.consumer.idleEvery)
	defer p.idle.Stop()
	if p.engine.cfg.Order == OrderByPartition {
		p.serve()
		return
	}
	newFleet(p).runWorkers()
}

// serve handles one batch after the other, and in between the parked messages that are due, until the
// partition must stop.
func (p *partition) serve() {
	for ok := true; ok && !p.lane.stopped(); {
		select {
		case <-p.looked:
			ok = p.release()
		default:
		}
		if batch := p.queue.pop(p.lane.batch()); ok && len(batch) > 0 {
			ok = p.lane.process(p.lane.messages(batch, p.topicID))
		} else if ok {
			ok = p.rest()
		}
	}
}

// rest waits for records, due parked messages or the idle tick.
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

// release retries due parked messages and the messages behind them, and asks for another release if
// there may be more. It returns false if the partition must stop.
func (p *partition) release() bool {
	if p.queue.isHalted() {
		return true
	}
	list, err := p.lane.due(p.lane.ctx)
	if err == nil && len(list) > 0 {
		if err = p.lane.release(p.lane.ctx, list); err == nil {
			p.requestRelease() // there may be more
		}
	}
	if err != nil && !p.lane.stopped() {
		p.lane.said.warn(p.lane, "could not read due parked messages; will retry", err)
	}
	return !p.lane.stopped()
}

// requestRelease asks for a release.
func (p *partition) requestRelease() {
	select {
	case p.looked <- struct{}{}:
	default:
	}
}

// advanceIdle stores a position after control records that no message follows. It returns false if
// the partition must stop.
func (p *partition) advanceIdle() bool {
	behind, at := p.queue.behindControl()
	if behind == 0 || p.pos.stored != nil && *p.pos.stored >= behind {
		return true
	}
	return p.advance(passed{behind, at})
}

// advance stores a position outside of the transactions that handled the messages. It returns false
// if the partition must stop.
func (p *partition) advance(to passed) bool {
	e := p.engine
	ctx, cancel := e.bounded(p.lane.ctx)
	defer cancel()
	var stored *int64
	err := e.pool.QueryRow(ctx, e.sql.advanceApart, e.cfg.Group, p.pos.topic, p.pos.partition, p.pos.epoch, p.pos.stored, to.behind, to.at, p.pos.server).Scan(&stored)
	f := engineFailure(err)
	switch {
	case err == nil:
		p.lane.become(StateRunning, nil)
		p.pos.stored = stored
		p.publish()
		p.mark(to.behind)
		return true
	case errors.Is(err, pgx.ErrNoRows):
		f.err = errServerChanged
		return p.lane.takeBack(f)
	case e.verdict(f) == verdictFenced:
		return p.lane.takeBack(f)
	}
	return p.lane.stopped() || p.lane.wait(1, f) // a position that is not stored now is stored later
}
