package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/say"
)

// partition is a partition that this consumer holds. Its lanes handle what is in its backlog: one with
// OrderByPartition, otherwise Config.Workers. Its dispatcher stores positions, and looks for what is
// due.
type partition struct {
	consumer *Consumer
	ctx      context.Context //nolint:containedctx // the life of the partition; when it ends, transactions roll back
	cancel   context.CancelFunc
	active   context.Context    //nolint:containedctx // when it ends, no further transaction and no further attempt begin
	stop     context.CancelFunc // ends it
	done     chan struct{}

	pos     *position
	name    dedup.Consumer // the consumer's name, registered; scope is its text
	scope   string
	alias   string // what the topic is called in IDs
	backlog *backlog
	lane    *lane // the dispatcher's
	held    *heldKeys
	breaker *breaker
	// suspects are messages that the last holder may have been handling when it ended.
	suspects atomic.Int64
	unclean  atomic.Bool // it ended as if the process had: the next holder has suspects if nothing was finished

	marked    func(next int64)  // called when all before next is done
	committed func(out outcome) // called after each transaction
	refused   func(f *failure)  // called when the position was refused: the partition ends, and is acquired again

	said     say.Lines
	storing  sync.Mutex      // one goroutine at a time writes stored to the position
	noting   sync.Mutex      // guards what follows
	troubles map[any]trouble // of lanes, of messages, and of the partition
	troubled atomic.Bool     // there are some
	does     condition       // the worst of them
	stored   string          // of one of them

	during   uint64        // this poll, and earlier ones, may return records that were fetched before the partition began
	looked   chan struct{} // buffers one signal: parked messages are due
	lookedAt int64         // where it was when the watchdog last missed records; -1: it missed none

	given []*kgo.Record // by Deliver: the partition ends behind the last one; nil: the records come from Kafka
	ended bool          // everything is done
}

// idleEvery is how often a partition without messages stores a position after control records.
const idleEvery = 10 * time.Second

// newPartition returns a partition that does not run yet. client is nil if the records come from
// Deliver. The partition outlives the callback that starts it and the poll loop that feeds it: stop
// ends it. If the last holder ended without a clean release and without finishing any message, the
// messages that it may have been handling are suspects.
func (c *Consumer) newPartition(ctx context.Context, client *kgo.Client, pos *position) *partition {
	p := &partition{
		consumer: c, done: make(chan struct{}),
		pos: pos, name: c.ids[pos.topic], scope: c.names[pos.topic], alias: c.cfg.alias(pos.topic),
		backlog: newBacklog(client, topicPartition{pos.topic, pos.partition}, c.cfg.Order, c.cfg.BatchMax), held: newHeldKeys(), breaker: &breaker{shareMax: c.cfg.ParkShareMax},
		marked: func(int64) {}, committed: func(outcome) {}, troubles: map[any]trouble{}, lookedAt: -1, looked: make(chan struct{}, 1),
	}
	p.ctx, p.cancel = context.WithCancel(ctx)
	p.active, p.stop = context.WithCancel(p.ctx)
	p.does.become(StateRunning, nil)
	if p.lane = p.newLane(); pos.stuck > 0 && c.cfg.OnFailure != OnFailureBlock {
		p.suspects.Store(int64(p.lane.size * c.cfg.Workers))
		p.log(slog.LevelWarn, "the last holder of the partition ended without finishing anything: the first messages are tried alone", "times", pos.stuck, "messages", p.suspects.Load())
	}
	return p
}

func (p *partition) key() topicPartition { return p.backlog.key }

func (p *partition) stopped() bool { return p.ctx.Err() != nil || p.active.Err() != nil } // handlers' contexts may end before active

// run handles messages until the partition is stopped, or, with Deliver, until all are done.
func (p *partition) run() {
	defer close(p.done)
	defer p.cancel()
	for waits := 1; ; waits++ {
		err := p.loadHeld()
		if err == nil {
			break
		}
		if p.stopped() || !p.lane.wait(waits, engineFailure(err)) {
			return
		}
	}
	p.lane.works()
	if p.given != nil {
		p.release() // what is due comes first
		p.backlog.arrive(p.given, p.messages)
	}
	var running sync.WaitGroup
	for range p.consumer.cfg.Workers {
		running.Go(p.newLane().work)
	}
	finished := p.dispatch()
	p.stop()
	running.Wait()
	if p.ctx.Err() == nil {
		p.ended = p.advance() && finished && p.isStored()
	}
}

// isStored reports whether everything that is done is stored.
func (p *partition) isStored() bool {
	next, _ := p.backlog.low()
	return p.pos.next.Load() >= next
}

// dispatch stores positions and gives out what is due, until the partition must stop. It looks for a
// position to be stored every idleEvery (after control records, which no transaction handles), and while
// workers have messages in progress every advanceEvery. It returns whether everything is done that Deliver
// got.
func (p *partition) dispatch() (finished bool) {
	tick, busy := time.NewTicker(p.consumer.idleEvery), false
	defer tick.Stop()
	for ok := true; ok; {
		if p.given != nil && len(p.looked) == 0 && p.backlog.idle() {
			list, err := p.due()
			if err != nil {
				p.warn("could not read due parked messages", err)
			}
			if len(list) == 0 {
				return err == nil
			}
			signal(p.looked)
		}
		select {
		case <-p.backlog.turned:
			if !busy && p.consumer.cfg.Order != OrderByPartition {
				busy = true
				tick.Reset(advanceEvery)
			}
		case <-p.looked:
			ok = p.release()
		case <-tick.C:
			if ok = p.advance(); busy && p.backlog.idle() && p.isStored() {
				busy = false
				tick.Reset(p.consumer.idleEvery)
			}
		case <-p.active.Done():
			return false
		}
	}
	return false
}

// release gives parked messages that are due to the lanes. It returns false if the partition must
// stop.
func (p *partition) release() bool {
	list, err := p.due()
	if err != nil {
		p.warn("could not read due parked messages; will retry", err)
		return !p.stopped()
	}
	p.backlog.release(list)
	return true
}

// handledAll reports whether everything that arrived is handled and stored.
func (p *partition) handledAll() bool {
	b := p.backlog
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.open) == 0 && (b.seen == b.begin || p.pos.next.Load() >= b.seen)
}

// compare reports whether all records up to the end of the topic have arrived, whether fetching is
// stuck, that is, nothing arrived since the last call although it could have, and the offset up to
// which records arrived.
func (p *partition) compare(end int64) (atEnd, stuck bool, seen int64) {
	b := p.backlog
	b.mu.Lock()
	defer b.mu.Unlock()
	missing := end > b.seen && b.fetches && !b.ended && b.waiting == 0
	stuck = missing && p.lookedAt == b.seen
	if p.lookedAt = -1; missing {
		p.lookedAt = b.seen
	}
	return end <= b.seen, stuck, b.seen
}

// advance stores the offset up to which everything is done, unless the transactions that handled the
// messages did. It returns false if the partition must stop.
func (p *partition) advance() bool {
	next, at := p.backlog.low()
	if next == 0 || next <= p.pos.next.Load() {
		p.lane.works()
		return true
	}
	c := p.consumer
	ctx, cancel := c.bounded(p.ctx)
	defer cancel()
	var stored *int64
	err := c.pool.QueryRow(ctx, c.sql[advanceApartSQL], c.cfg.Group, p.pos.topic, p.pos.partition, p.pos.epoch, p.pos.stored(), next, at, p.pos.server).Scan(&stored)
	f := engineFailure(err)
	if errors.Is(err, pgx.ErrNoRows) {
		// Only memory knows what workers have done, and the server may have lost it.
		f = engineFailure(fmt.Errorf("%w: %w", errFenced, errServerChanged))
	}
	switch {
	case err == nil:
		p.lane.works()
		p.pos.set(stored)
		p.marked(next)
		return true
	case f.verdict() == verdictFenced:
		return p.lane.fenced(f)
	}
	return p.stopped() || p.lane.wait(1, f) // a position that is not stored now is stored later
}

// halt begins or ends an operator's pause. It reports whether that changed anything.
func (p *partition) halt(paused bool) bool {
	if paused {
		p.record(p, &trouble{state: StatePausedByOperator, err: errPaused})
	} else {
		p.record(p, nil)
	}
	return p.backlog.halt(paused)
}
