package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"sync"

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
// the given order. Topic, partition, offset and timestamp count as if they came from Kafka, but a claim
// that is gone is not missed by its offset, only by its times: records may leave offsets out. Parked
// messages that are due begin first. Deliver returns when all messages are done or parked, also
// those that a later call tries again; or with an error when ctx ends, or another consumer took the
// partition. Then uncommitted work was rolled back, and delivering all records again is safe. Do not
// call it while Run consumes the same partitions: each would take them from the other.
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
	h := c.newHold(key)
	if err := c.hold(ctx, []*hold{h}, nil); err != nil {
		return err
	}
	p := c.newPartition(ctx, nil, h.pos)
	var mu sync.Mutex // lanes share what follows
	var refused error
	p.committed = func(out outcome) {
		mu.Lock()
		defer mu.Unlock()
		sum.Fresh += out.fresh
		sum.Duplicates += out.duplicates
		sum.Parked += len(out.parked)
	}
	p.refused = func(f *failure) {
		mu.Lock()
		defer mu.Unlock()
		refused = f.err
	}
	p.given = records
	p.backlog.start(math.MinInt64)
	p.run() //nolint:contextcheck // the partition has its own
	if !p.ended {
		return cmp.Or(context.Cause(ctx), errors.Join(errNotDone, refused))
	}
	return c.giveUp(ctx, []*position{p.pos})
}

var errNotDone = errors.New("not all messages were handled: deliver them again")
