package demo

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	// duplicated is the share of messages that are published again.
	duplicated = 0.12
	// duplicateDelayMax spreads the duplicates: some follow at once, others when their partition
	// has another owner.
	duplicateDelayMax = 4 * time.Second
	duplicateTick     = 100 * time.Millisecond
)

// duplicator publishes messages again, with their IDs and at other offsets, as a producer without
// idempotence or a failed-over cluster does. It reads the topic to find them.
type duplicator struct {
	client *kgo.Client
	random *rand.Rand
	seen   map[string]bool // message IDs
	queue  []delayed

	delivered, injected atomic.Int64
}

type delayed struct {
	due    time.Time
	record *kgo.Record
}

func newDuplicator(j job) (*duplicator, error) {
	client, err := kgo.NewClient(append(j.kafka(),
		kgo.ConsumeTopics(j.Topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		// A copy belongs in the partition of its original, whatever chose that partition.
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
	)...)
	if err != nil {
		return nil, err
	}
	return &duplicator{client: client, random: newRandom(j.Seed, streamDuplicates), seen: make(map[string]bool)}, nil
}

// run works until ctx ends, or until finish is closed and everything queued up to that point is
// published.
func (d *duplicator) run(ctx context.Context, finish <-chan struct{}) error {
	defer d.client.Close()
	for {
		finishing := false
		select {
		case <-finish:
			finishing = true
		default:
		}
		poll, cancel := context.WithTimeout(ctx, duplicateTick)
		fetches := d.client.PollFetches(poll)
		cancel()
		if ctx.Err() != nil {
			return nil
		}
		fetches.EachRecord(d.look)
		if err := d.publish(ctx, finishing); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("publish duplicates: %w", err)
		}
		if finishing {
			return nil
		}
	}
}

// look remembers a message at its first occurrence, and draws whether to repeat it: never, once, or
// twice (the copy is due soon after).
func (d *duplicator) look(r *kgo.Record) {
	id := ""
	for _, h := range r.Headers {
		if h.Key == "message-id" {
			id = string(h.Value)
		}
	}
	if d.seen[id] {
		return
	}
	d.seen[id] = true
	d.delivered.Add(1)
	for d.random.Float64() < duplicated {
		twin := &kgo.Record{Topic: r.Topic, Partition: r.Partition, Key: r.Key, Value: r.Value, Headers: r.Headers}
		d.queue = append(d.queue, delayed{due: time.Now().Add(between(d.random, 0, duplicateDelayMax)), record: twin})
	}
}

// publish sends the messages that are due, or all.
func (d *duplicator) publish(ctx context.Context, everything bool) error {
	var due []*kgo.Record
	var later []delayed
	for _, q := range d.queue {
		if everything || time.Now().After(q.due) {
			due = append(due, q.record)
		} else {
			later = append(later, q)
		}
	}
	d.queue = later
	if len(due) == 0 {
		return nil
	}
	if err := d.client.ProduceSync(ctx, due...).FirstErr(); err != nil {
		return err
	}
	d.injected.Add(int64(len(due)))
	return nil
}
