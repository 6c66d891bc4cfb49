package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"
)

// partition is one goroutine that handles the records of a partition in order, batch by batch, or
// passes them to workers.
type partition struct {
	engine  *engine // the consumer's
	lane    *lane
	queue   *queue
	pos     *position
	topicID uuid.UUID
	marked  func(next int64) // called when all before next is done

	// For the partition's state: whether an operator paused it, and what does not run. Guarded by
	// the session's mutex.
	paused bool
	lanes  map[any]laneState // lanes, and messages that block

	cancel   context.CancelFunc
	stopping chan struct{} // closed: no further batch, no further attempt
	once     sync.Once
	done     chan struct{}

	during    uint64        // this poll, and earlier ones, may return records that were fetched before the partition began
	looked    chan struct{} // buffers one signal: parked messages are due
	idleEvery time.Duration
	idle      *time.Ticker

	lookedAt struct{ seen, end int64 } // what the watchdog saw last

	finite bool // the records come from Deliver: the partition ends behind the last one
	ended  bool // everything is done
}

// idleEvery is how often a partition without messages stores a position after control records.
const idleEvery = 10 * time.Second

// newPartition returns a partition that does not run yet. client is nil if the records come from
// Deliver. The partition outlives the callback that starts it and the poll loop that feeds it: stop
// ends it.
func (c *Consumer) newPartition(ctx context.Context, client *kgo.Client, pos *position, topicID uuid.UUID) *partition {
	ctx, cancel := context.WithCancel(ctx)
	p := &partition{
		engine: c.engine, pos: pos, topicID: topicID, cancel: cancel, lanes: map[any]laneState{}, idleEvery: c.idleEvery,
		stopping: make(chan struct{}), done: make(chan struct{}), looked: make(chan struct{}, 1), marked: func(int64) {},
	}
	p.queue = newQueue(client, pos.topic, pos.partition, c.engine.cfg.BatchMax)
	p.lane = c.newLane(ctx, pos, p.stopping)
	p.lane.noted = func(any, laneState) {}
	p.lane.committed = func(last *Message, out outcome) {
		if last.row == 0 && !out.apart {
			p.marked(last.next())
		}
	}
	return p
}

// newLane returns the lane of a partition. If the last holder ended without a clean release and
// without finishing any message, the messages that it may have been handling are suspects.
func (c *Consumer) newLane(ctx context.Context, pos *position, stopping <-chan struct{}) *lane {
	cfg := &c.engine.cfg
	l := &lane{
		engine: c.engine, ctx: ctx, stopping: stopping, does: laneState{state: StateRunning}, size: min(batchBegins, cfg.BatchMax),
		scope: c.names[pos.topic], alias: cfg.alias(pos.topic), idSources: c.ids[pos.topic].IDRule().Sources(),
		work:    work{consumer: c.ids[pos.topic], pos: pos, held: newHeldKeys(), asks: newAsks()},
		breaker: newBreaker(cfg.ParkShareMax), suspects: &atomic.Int64{},
	}
	if pos.stuck > 0 && cfg.OnFailure != OnFailureBlock {
		l.suspects.Store(int64(l.size * cfg.Workers))
		l.log(slog.LevelWarn, "the last holder of the partition ended without finishing anything: the first messages are tried alone", "times", pos.stuck, "messages", l.suspects.Load())
	}
	return l
}

func (p *partition) key() topicPartition { return topicPartition{p.queue.topic, p.queue.partition} }

func (p *partition) stop() { p.once.Do(func() { close(p.stopping) }) }

// handleUntilStopped handles messages. exited is called if a user's function ended the goroutine.
func (p *partition) handleUntilStopped(exited func(error)) {
	defer close(p.done)
	defer p.cancel()
	returned := false
	defer func() {
		if !returned {
			exited(errGoexit)
		}
	}()
	p.consume()
	returned = true
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
	p.idle = time.NewTicker(p.idleEvery)
	defer p.idle.Stop()
	if p.finite {
		p.requestRelease() // what is due comes first
	}
	if p.engine.cfg.Order == OrderByPartition {
		p.serve()
		return
	}
	newWorkers(p, p.engine.cfg.BatchMax).run(p.engine.cfg.Workers)
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
		} else if ok && p.finite {
			ok = p.finish()
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
		p.lane.warn("could not read due parked messages; will retry", err)
	}
	return !p.lane.stopped()
}

// finish retries what is due behind the last record. It returns false when nothing is.
func (p *partition) finish() bool {
	list, err := p.lane.due(p.lane.ctx)
	if err != nil || len(list) == 0 {
		p.ended = err == nil
		return false
	}
	p.requestRelease()
	return true
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
	if behind == 0 || p.pos.next.Load() >= behind {
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
	err := e.pool.QueryRow(ctx, e.sql[advanceApartSQL], e.cfg.Group, p.pos.topic, p.pos.partition, p.pos.epoch, p.pos.stored(), to.behind, to.at, p.pos.server).Scan(&stored)
	f := engineFailure(err)
	if errors.Is(err, pgx.ErrNoRows) {
		// Only memory knows what workers have done, and the server may have lost it.
		f = engineFailure(fmt.Errorf("%w: %w", errFenced, errServerChanged))
	}
	switch {
	case err == nil:
		p.lane.become(StateRunning, nil)
		p.pos.set(stored)
		p.marked(to.behind)
		return true
	case e.verdict(f) == verdictFenced:
		return p.lane.fenced(f)
	}
	return p.lane.stopped() || p.lane.wait(1, f) // a position that is not stored now is stored later
}
