package consumer

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/crashpoint"
)

// partition is one goroutine that handles the records of a partition in order, batch by batch.
type partition struct {
	*session
	pos     *position
	topicID uuid.UUID

	ctx      context.Context //nolint:containedctx // the worker's life: cancel ends the batch in progress
	cancel   context.CancelFunc
	stopping chan struct{} // closed: no further batch, no further attempt
	once     sync.Once
	done     chan struct{}

	queue   sync.Mutex
	waiting []*kgo.Record
	bytes   int // of keys and values waiting
	paused  bool
	arrived chan struct{} // has room for one signal
}

func newPartition(s *session, pos *position, topicID uuid.UUID) *partition {
	// The worker outlives the callback that started it, and the poll loop that feeds it: stop ends it.
	ctx, cancel := context.WithCancel(context.WithoutCancel(s.client.Context()))
	return &partition{
		session: s, pos: pos, topicID: topicID, ctx: ctx, cancel: cancel,
		stopping: make(chan struct{}), done: make(chan struct{}), arrived: make(chan struct{}, 1),
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
	p.waiting = append(p.waiting, records...)
	p.bytes += recordBytes(records)
	select {
	case p.arrived <- struct{}{}:
	default:
	}
	if !p.paused && (len(p.waiting) >= waitingBatchesMax*p.cfg.BatchMax || p.bytes >= waitingBytesMax) {
		p.paused = true
		p.client.PauseFetchPartitions(map[string][]int32{p.pos.topic: {p.pos.partition}})
	}
}

// next waits for the next batch; nil: the partition is to stop.
func (p *partition) next() []*kgo.Record {
	for {
		select {
		case <-p.stopping:
			return nil
		default:
		}
		if batch := p.pop(); len(batch) > 0 {
			return batch
		}
		select {
		case <-p.stopping:
		case <-p.arrived:
		}
	}
}

func (p *partition) pop() []*kgo.Record {
	p.queue.Lock()
	defer p.queue.Unlock()
	n := min(len(p.waiting), p.cfg.BatchMax)
	batch := p.waiting[:n:n]
	p.waiting = p.waiting[n:]
	p.bytes -= recordBytes(batch)
	if len(p.waiting) == 0 {
		p.waiting = nil // or the array of an old burst would stay
	}
	if p.paused && len(p.waiting) < waitingBatchesMax/2*p.cfg.BatchMax && p.bytes < waitingBytesMax/2 {
		p.paused = false
		p.client.ResumeFetchPartitions(map[string][]int32{p.pos.topic: {p.pos.partition}})
	}
	return batch
}

func (p *partition) stop() { p.once.Do(func() { close(p.stopping) }) }

func (p *partition) stopped() bool {
	select {
	case <-p.stopping:
		return true
	default:
		return p.ctx.Err() != nil
	}
}

func (p *partition) run() {
	defer close(p.done)
	defer p.cancel()
	for batch := p.next(); batch != nil; batch = p.next() {
		msgs := make([]*Message, len(batch))
		for i, record := range batch {
			msgs[i] = p.newMessage(record, p.topicID)
		}
		if !p.process(msgs, batch) {
			return
		}
	}
}

// process works until every message of a batch is done, or the partition is to stop: then it returns
// false and the next holder goes on from the stored position.
//
// A batch that fails is rolled back and split: what stands before the culprit commits, the culprit is
// tried alone until it succeeds, the rest follows. Where the culprit is not known (an error at COMMIT)
// the halves are tried.
func (p *partition) process(msgs []*Message, records []*kgo.Record) bool {
	for attempt := 0; len(msgs) > 0; {
		if p.stopped() {
			return false
		}
		err := p.try(msgs, records)
		if err == nil {
			return true
		}
		if p.stopped() {
			return false
		}
		var failed *messageError
		switch {
		case errors.Is(err, errFenced):
			err = p.rehold(p.ctx, p)
			if errors.Is(err, errWentBack) {
				p.restart(err)
				return false
			}
			attempt = p.waitOut(attempt, err)
		case troubleOfDatabase(err), concurrent(err):
			attempt = p.waitOut(attempt, err)
		case len(msgs) == 1:
			attempt = p.complain(attempt, msgs[0], err)
		case errors.As(err, &failed) && failed.index > 0:
			if !p.process(msgs[:failed.index], records[:failed.index]) {
				return false
			}
			attempt, msgs, records = 0, msgs[failed.index:], records[failed.index:]
		default:
			half := (len(msgs) + 1) / 2
			if failed != nil {
				half = 1 // the first message is the culprit
			}
			if !p.process(msgs[:half], records[:half]) {
				return false
			}
			attempt, msgs, records = 0, msgs[half:], records[half:]
		}
	}
	return true
}

// try applies a batch once and marks its last offset.
func (p *partition) try(msgs []*Message, records []*kgo.Record) error {
	fresh, err := p.apply(p.ctx, p.ids[p.pos.topic], p.pos, msgs)
	if err != nil {
		return err
	}
	if p.cfg.Hooks.Processed != nil {
		p.cfg.Hooks.Processed(p.pos.topic, fresh, len(msgs)-fresh)
	}
	p.client.MarkCommitRecords(records[len(records)-1])
	crashpoint.Here(crashpoint.ConsumerMarked)
	return nil
}

// waitOut pauses after trouble that is no message's fault.
func (p *partition) waitOut(attempt int, err error) int {
	if err == nil {
		return 0
	}
	attempt++
	wait := p.backoff(attempt)
	p.cfg.Logger.WarnContext(p.ctx, "partition waits for the database; nothing is lost", "group", p.cfg.Group,
		"topic", p.pos.topic, "partition", p.pos.partition, "attempt", attempt, "error", err, "retry_in", wait)
	p.pause(wait)
	return attempt
}

// complain reports a failed attempt at a single message and pauses.
func (p *partition) complain(attempt int, msg *Message, err error) int {
	attempt++
	wait := p.backoff(attempt)
	if IsPermanent(err) {
		wait = p.cfg.RetryMax // only a new version of the handler can help
	}
	if p.cfg.Hooks.Failed != nil {
		p.cfg.Hooks.Failed(msg, attempt, err)
	}
	p.cfg.Logger.ErrorContext(p.ctx, "message fails and blocks its partition until it succeeds", "group", p.cfg.Group,
		"topic", msg.Topic, "partition", msg.Partition, "offset", msg.Offset, "id", msg.ID,
		"attempt", attempt, "permanent", IsPermanent(err), "error", err, "retry_in", wait)
	p.pause(wait)
	return attempt
}

// pause waits, unless the partition is to stop.
func (p *partition) pause(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.stopping:
	case <-p.ctx.Done():
	}
}
