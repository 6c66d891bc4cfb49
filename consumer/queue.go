package consumer

import (
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"
)

// A partition pauses when much waits and resumes when half of it is left. A fetch that is under way while it
// is paused leaves it out and may wait for other partitions, up to the client's FetchMaxWait: what still
// waits has to last that long.
const (
	waitingBatchesMax = 20
	waitingBytesMax   = 16 << 20
)

// queue holds the records of a partition that arrived and are not in work.
type queue struct {
	client    *kgo.Client
	topic     string
	partition int32
	batchMax  int
	arrived   chan struct{} // has room for one signal

	mu        sync.Mutex
	waiting   []queued
	bytes     int // of keys, values and headers waiting
	paused    bool
	halted    bool      // by an operator
	begin     int64     // what comes before was asked for by an earlier fetch
	seen      int64     // offset behind the last record that arrived, control records included
	seenAt    time.Time // the last record's
	delivered int64     // the same without control records
}

// queued is a record with the offset behind it and the control records that follow it.
type queued struct {
	record *kgo.Record
	behind int64
}

func newQueue(client *kgo.Client, topic string, partition int32, batchMax int) *queue {
	return &queue{client: client, topic: topic, partition: partition, batchMax: batchMax, arrived: make(chan struct{}, 1)}
}

// start says where the first record is expected.
func (q *queue) start(offset int64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.begin, q.seen, q.delivered = offset, offset, offset
}

func recordBytes(r *kgo.Record) int {
	n := len(r.Key) + len(r.Value)
	for _, h := range r.Headers {
		n += len(h.Key) + len(h.Value)
	}
	return n
}

// add takes records, and pauses fetching when enough of them wait. Pausing and resuming happen under
// the lock that guards what they are decided by: done later, a pause could land after the resume that
// answers it, and nothing would be fetched any more.
func (q *queue) add(records []*kgo.Record) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, record := range records {
		if record.Offset < q.begin {
			continue
		}
		q.seen, q.seenAt = record.Offset+1, recordTime(record)
		if !record.Attrs.IsControl() {
			q.waiting = append(q.waiting, queued{record, q.seen})
			q.bytes += recordBytes(record)
			q.delivered = q.seen
			continue
		}
		if n := len(q.waiting); n > 0 {
			q.waiting[n-1].behind = q.seen
		}
	}
	select {
	case q.arrived <- struct{}{}:
	default:
	}
	if !q.paused && (len(q.waiting) >= waitingBatchesMax*q.batchMax || q.bytes >= waitingBytesMax) {
		q.paused = true
		q.client.PauseFetchPartitions(map[string][]int32{q.topic: {q.partition}})
	}
}

// pop takes the records of the next batch.
func (q *queue) pop() []queued {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.halted {
		return nil
	}
	n := min(len(q.waiting), q.batchMax)
	batch := slices.Clone(q.waiting[:n])
	clear(q.waiting[:n]) // what arrives later keeps none of what is done
	q.waiting = q.waiting[n:]
	for _, r := range batch {
		q.bytes -= recordBytes(r.record)
	}
	if len(q.waiting) == 0 {
		q.waiting = nil // or the array of an old burst would stay
	}
	if q.paused && len(q.waiting) < waitingBatchesMax/2*q.batchMax && q.bytes < waitingBytesMax/2 {
		q.paused = false
		q.client.ResumeFetchPartitions(map[string][]int32{q.topic: {q.partition}})
	}
	return batch
}

// halt stops or resumes handing out records. It reports whether that changed anything.
func (q *queue) halt(halted bool) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	changed := q.halted != halted
	q.halted = halted
	if changed && !halted {
		select {
		case q.arrived <- struct{}{}:
		default:
		}
	}
	return changed
}

// isHalted reports whether an operator paused the topic: nothing of the partition is begun.
func (q *queue) isHalted() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.halted
}

// behindControl returns the offset behind the last record where nothing waits, and its time; 0: something waits, or
// nothing arrived yet.
func (q *queue) behindControl() (int64, time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) > 0 || q.seenAt.IsZero() {
		return 0, time.Time{}
	}
	return q.seen, q.seenAt
}

// compare reports whether everything up to the end of the topic has arrived, whether nothing arrived since the
// last time although it could have, and up to where messages arrived.
func (p *partition) compare(end int64) (atEnd, stuck bool, delivered int64) {
	q := p.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	missing := end > q.seen && !q.paused && len(q.waiting) == 0
	stuck = missing && p.lookedAt.end > p.lookedAt.seen && p.lookedAt.seen == q.seen
	p.lookedAt.seen, p.lookedAt.end = q.seen, end
	if !missing {
		p.lookedAt.end = q.seen
	}
	return end <= q.seen, stuck, q.delivered
}

func errIsNoRows(err error) bool { return errors.Is(err, pgx.ErrNoRows) }
