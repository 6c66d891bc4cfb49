package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"sync"
	"sync/atomic"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Delivered counts the results of messages.
type Delivered struct {
	// Fresh messages were handled, Duplicates were dropped, Parked were parked or made dead
	// letters.
	Fresh, Duplicates, Parked int
}

// Deliver handles records as Run does, with claims, positions, retries and parking, but without
// Kafka: for tests, and for records from another source. It handles the records of a partition in
// the given order. Topic, partition, offset and timestamp count as if they came from Kafka. Parked
// messages that are due are handled first. Deliver returns when all messages are done or parked, also
// those that a later call tries again, or when ctx ends. Then uncommitted work was rolled back, and delivering all records again is
// safe. Do not call it while Run consumes the same partitions: each would take them from the other.
func (c *Consumer) Deliver(ctx context.Context, records ...*kgo.Record) (Delivered, error) {
	var sum Delivered
	if err := c.prepare(ctx); err != nil {
		return sum, err
	}
	var order []topicPartition
	byPartition := map[topicPartition][]*kgo.Record{}
	for _, record := range records {
		if _, known := c.ids[record.Topic]; !known {
			return sum, fmt.Errorf("record of topic %q: want one of Topics", record.Topic)
		}
		key := topicPartition{record.Topic, record.Partition}
		if byPartition[key] == nil {
			order = append(order, key)
		}
		byPartition[key] = append(byPartition[key], record)
	}
	for _, key := range order {
		if err := c.deliver(ctx, key, byPartition[key], &sum); err != nil {
			return sum, fmt.Errorf("deliver to %s/%d: %w", key.topic, key.partition, err)
		}
	}
	return sum, nil
}

func (c *Consumer) deliver(ctx context.Context, key topicPartition, records []*kgo.Record, sum *Delivered) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	take := hold{topicPartition: key}
	for _, record := range records {
		take.offsets = append(take.offsets, record.Offset)
	}
	taken, err := c.hold(ctx, []hold{take}, nil)
	if err != nil {
		return err
	}
	pos := taken[0].pos
	l := c.newLane(ctx, pos, nil)
	var counting sync.Mutex
	l.committed = func(_ *Message, out outcome) {
		counting.Lock()
		defer counting.Unlock()
		sum.Fresh += out.fresh
		sum.Duplicates += out.duplicates
		sum.Parked += len(out.parked)
	}
	l.regain = func(ctx context.Context) error {
		before := pos.stored
		again, err := c.hold(ctx, []hold{take}, nil)
		if err != nil {
			return err
		}
		pos.renew(again[0].pos)
		if before != nil && (pos.stored == nil || *pos.stored < *before) {
			return errWentBack // what this call counted may be lost: delivering all records again is safe
		}
		return nil
	}
	l.restart = func(err error) { cancel(err) }
	if err := l.loadHeld(ctx); err != nil {
		return err
	}
	if err := l.releaseAll(ctx); err != nil {
		return err
	}
	for len(records) > 0 {
		n := min(len(records), c.engine.cfg.BatchMax)
		batch := make([]queued, n)
		for i, record := range records[:n] {
			batch[i] = queued{record: record}
		}
		msgs := l.messages(batch, uuid.Nil)
		if c.engine.cfg.Order == OrderByPartition {
			if !l.process(msgs) { //nolint:contextcheck // the lane has its own
				return context.Cause(ctx)
			}
		} else if err := l.processTogether(msgs); err != nil { //nolint:contextcheck // as above
			return cmp.Or(context.Cause(ctx), err)
		}
		records = records[n:]
	}
	if err := l.releaseAll(ctx); err != nil {
		return err
	}
	return c.giveUp(ctx, []*position{pos})
}

// releaseAll retries the parked messages that are due, until none is.
func (l *lane) releaseAll(ctx context.Context) error {
	for {
		list, err := l.due(ctx)
		if err != nil || len(list) == 0 {
			return err
		}
		if err := l.release(ctx, list); err != nil || l.stopped() {
			return cmp.Or(err, context.Cause(ctx), errNotDone)
		}
	}
}

// processTogether handles messages with several workers, as a partition under Run does, and then
// advances the position.
func (l *lane) processTogether(msgs []*Message) error {
	e := l.engine
	seed, shares := maphash.MakeSeed(), make([][]*Message, e.cfg.Workers)
	for i, msg := range msgs {
		at := i % len(shares)
		if e.cfg.Order == OrderByKey && msg.Key != nil {
			at = int(maphash.Bytes(seed, msg.Key) % uint64(len(shares)))
		}
		shares[at] = append(shares[at], msg)
	}
	last := msgs[len(msgs)-1]
	for _, msg := range msgs {
		if msg.Offset > last.Offset {
			last = msg
		}
	}
	behind, at := last.next(), last.Time
	pos := *l.work.pos // as the workers see it
	var done atomic.Int32
	var workers sync.WaitGroup
	for _, share := range shares {
		w := l.worker()
		w.work.pos, w.committed = &pos, l.committed
		// A refused position affects all workers: the call ends, and delivering again is safe.
		w.regain = func(context.Context) error { return errWentBack }
		workers.Go(func() {
			if w.process(share) {
				done.Add(1)
			}
		})
	}
	workers.Wait()
	if int(done.Load()) < len(shares) {
		return errNotDone
	}
	ctx, cancel := e.bounded(l.ctx)
	defer cancel()
	err := e.pool.QueryRow(ctx, e.sql.advanceApart, e.cfg.Group, l.work.pos.topic, l.work.pos.partition, l.work.pos.epoch, l.work.pos.stored, behind, at, l.work.pos.server).
		Scan(&l.work.pos.stored)
	if err != nil {
		return fmt.Errorf("advance the position: %w", err)
	}
	return nil
}

var errNotDone = errors.New("not all messages were handled: deliver them again")
