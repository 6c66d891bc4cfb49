package consumer

import (
	"context"
	"errors"
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
	lane    *lane

	pos     *position
	epoch   atomic.Int64 // of the last takeover; pos is its worker's
	topicID uuid.UUID

	cancel   context.CancelFunc
	stopping chan struct{} // closed: no further batch, no further attempt
	once     sync.Once
	done     chan struct{}

	queue     sync.Mutex
	waiting   []*kgo.Record
	bytes     int // of keys and values waiting
	paused    bool
	seen      int64         // offset behind the last record that arrived, control records included
	delivered int64         // the same without control records
	arrived   chan struct{} // has room for one signal

	lookedAt struct{ seen, end int64 } // by the watchdog, the last time
}

func newPartition(s *session, pos *position, topicID uuid.UUID) *partition {
	// The worker outlives the callback that started it, and the poll loop that feeds it: stop ends it.
	ctx, cancel := context.WithCancel(context.WithoutCancel(s.client.Context()))
	p := &partition{
		session: s, pos: pos, topicID: topicID, cancel: cancel,
		stopping: make(chan struct{}), done: make(chan struct{}), arrived: make(chan struct{}, 1),
	}
	p.epoch.Store(pos.epoch)
	p.lane = s.consumer.newLane(ctx, pos, p.stopping)
	p.lane.committed = func(last *Message, _ outcome) { p.mark(last) }
	p.lane.rehold = func(ctx context.Context) error { return s.rehold(ctx, p) }
	p.lane.restart = s.restart
	return p
}

// newLane makes the lane of a partition. After a takeover from a holder that ended without order, and without
// finishing anything, the messages that it may have died of are tried alone.
func (c *Consumer) newLane(ctx context.Context, pos *position, stopping <-chan struct{}) *lane {
	l := &lane{
		consumer: c, ctx: ctx, stopping: stopping, careful: &atomic.Int64{},
		work:    work{consumer: c.ids[pos.topic], pos: pos, held: &heldKeys{keys: map[keyHash]struct{}{}}},
		breaker: &breaker{shareMax: c.engine.cfg.ParkShareMax},
	}
	if pos.stuck > 0 {
		l.careful.Store(int64(c.engine.cfg.BatchMax))
		if pos.stored != nil {
			l.from = *pos.stored
		}
	}
	return l
}

// mark marks an offset to be committed to Kafka. A message that was parked came long ago.
func (p *partition) mark(last *Message) {
	if last.row == 0 {
		p.session.client.MarkCommitRecords(last.record)
	}
}

// A partition pauses when much waits and resumes when half of it is left. A fetch that is under way while it
// is paused leaves it out and may wait for other partitions, up to the client's FetchMaxWait: what still
// waits has to last that long.
const (
	waitingBatchesMax = 20
	waitingBytesMax   = 16 << 20
)

func recordBytes(records []*kgo.Record) (n int) {
	for _, r := range records {
		n += len(r.Key) + len(r.Value)
	}
	return n
}

// add takes records, and pauses fetching when enough of them wait. Pausing and resuming happen under
// the lock that guards what they are decided by: done later, a pause could land after the resume that
// answers it, and the partition would stand still for ever.
func (p *partition) add(records []*kgo.Record) {
	p.queue.Lock()
	defer p.queue.Unlock()
	p.seen = records[len(records)-1].Offset + 1
	for _, record := range records {
		if !record.Attrs.IsControl() {
			p.waiting = append(p.waiting, record)
			p.delivered = record.Offset + 1
		}
	}
	p.bytes += recordBytes(records)
	select {
	case p.arrived <- struct{}{}:
	default:
	}
	if !p.paused && (len(p.waiting) >= waitingBatchesMax*p.session.consumer.engine.cfg.BatchMax || p.bytes >= waitingBytesMax) {
		p.paused = true
		p.session.client.PauseFetchPartitions(map[string][]int32{p.pos.topic: {p.pos.partition}})
	}
}

func (p *partition) pop() []*kgo.Record {
	p.queue.Lock()
	defer p.queue.Unlock()
	n := min(len(p.waiting), p.session.consumer.engine.cfg.BatchMax)
	batch := p.waiting[:n:n]
	p.waiting = p.waiting[n:]
	p.bytes -= recordBytes(batch)
	if len(p.waiting) == 0 {
		p.waiting = nil // or the array of an old burst would stay
	}
	if p.paused && len(p.waiting) < waitingBatchesMax/2*p.session.consumer.engine.cfg.BatchMax && p.bytes < waitingBytesMax/2 {
		p.paused = false
		p.session.client.ResumeFetchPartitions(map[string][]int32{p.pos.topic: {p.pos.partition}})
	}
	return batch
}

func (p *partition) stop() { p.once.Do(func() { close(p.stopping) }) }

func (p *partition) run() {
	defer close(p.done)
	defer p.cancel()
	for waits := 1; ; waits++ {
		err := p.lane.load(p.lane.ctx)
		if err == nil {
			break
		}
		if !p.lane.waitOut(waits, err) {
			return
		}
	}
	if p.lane.careful.Load() > 0 {
		p.session.consumer.engine.cfg.Logger.WarnContext(p.lane.ctx, "the last holder of the partition ended without finishing anything: messages are tried alone for a while",
			"group", p.session.consumer.engine.cfg.Group, "topic", p.pos.topic, "partition", p.pos.partition, "times", p.pos.stuck, "messages", p.session.consumer.engine.cfg.BatchMax)
	}
	if p.session.consumer.engine.cfg.Order == OrderByPartition {
		p.alone(p.lane.stopped)
		return
	}
	p.alone(func() bool { return p.lane.stopped() || p.lane.careful.Load() <= 0 })
	newFleet(p).run()
}

// alone handles one batch after the other, and in between what operators hand back.
func (p *partition) alone(until func() bool) {
	tend := time.NewTimer(tendEvery)
	defer tend.Stop()
	for more := false; !until(); {
		if batch := p.pop(); len(batch) > 0 {
			if !p.lane.process(p.session.consumer.newMessages(batch, p.topicID)) {
				return
			}
		} else if !more {
			select {
			case <-p.stopping:
			case <-p.arrived:
			case <-tend.C:
				tend.Reset(0)
			}
		}
		select {
		case <-tend.C:
			more = true
		default:
		}
		if more {
			if more = p.tend(); !more {
				tend.Reset(tendEvery)
			}
		}
	}
}

// tend looks after the position and parked messages. Trouble makes it wait for another time.
func (p *partition) tend() (more bool) {
	err := p.lane.inPlace(p.lane.ctx)
	if err == nil {
		more, err = p.lane.tend(p.lane.ctx)
	}
	if errors.Is(err, errWentBack) {
		p.session.restart(err)
		return false
	}
	if err != nil && !p.lane.stopped() && !errors.Is(err, context.Canceled) {
		p.session.consumer.engine.cfg.Logger.WarnContext(p.lane.ctx, "parked messages cannot be looked after; it is tried again", "group", p.session.consumer.engine.cfg.Group,
			"topic", p.pos.topic, "partition", p.pos.partition, "error", err)
	}
	return more
}
