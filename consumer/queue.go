package consumer

import (
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// A partition pauses fetching when these limits are reached and resumes at half of them. A fetch
// that begins while it is paused excludes it and may wait for other partitions, up to the client's
// FetchMaxWait. The waiting records must last that long.
const (
	waitingBatchesMax = 20
	waitingBytesMax   = 16 << 20
)

// queue holds the records of a partition that have arrived and are not yet taken.
type queue struct {
	client    *kgo.Client
	topic     string
	partition int32
	batchMax  int
	arrived   chan struct{} // buffers one signal

	mu        sync.Mutex
	waiting   []queued
	bytes     int // of waiting keys, values and headers
	paused    bool
	halted    bool      // by an operator
	ended     bool      // no later records are taken, and fetching is no longer paused or resumed
	begin     int64     // earlier offsets come from an earlier fetch
	seen      int64     // offset after the last record that arrived, including control records
	seenAt    time.Time // time of that record
	delivered int64     // like seen, without control records
}

// queued is a record with the offset after it and the control records that follow it.
type queued struct {
	record *kgo.Record
	behind int64
}

func newQueue(client *kgo.Client, topic string, partition int32, batchMax int) *queue {
	return &queue{client: client, topic: topic, partition: partition, batchMax: batchMax, arrived: make(chan struct{}, 1)}
}

// start sets the offset at which the first record is expected.
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

// add adds records, and pauses fetching when enough of them wait. Pausing and resuming happen under
// the lock that guards the queue: otherwise a pause could take effect after a later resume, and
// fetching would stop forever.
func (q *queue) add(records []*kgo.Record) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ended {
		return
	}
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
	if q.client != nil && !q.paused && (len(q.waiting) >= waitingBatchesMax*q.batchMax || q.bytes >= waitingBytesMax) {
		q.paused = true
		q.client.PauseFetchPartitions(map[string][]int32{q.topic: {q.partition}})
	}
}

// pop takes the next records, at most n.
func (q *queue) pop(n int) []queued {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.halted {
		return nil
	}
	n = min(len(q.waiting), n)
	batch := slices.Clone(q.waiting[:n])
	clear(q.waiting[:n]) // the array must not keep finished records alive
	q.waiting = q.waiting[n:]
	for _, r := range batch {
		q.bytes -= recordBytes(r.record)
	}
	if len(q.waiting) == 0 {
		q.waiting = nil // otherwise the array of an old burst would stay
	}
	if q.paused && !q.ended && len(q.waiting) < waitingBatchesMax/2*q.batchMax && q.bytes < waitingBytesMax/2 {
		q.paused = false
		q.client.ResumeFetchPartitions(map[string][]int32{q.topic: {q.partition}})
	}
	return batch
}

func (q *queue) empty() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting) == 0
}

// end leaves the fetching of the partition to others. What has arrived can be taken.
func (q *queue) end() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ended = true
}

// handledAll reports whether everything that arrived is handled and stored.
func (p *partition) handledAll() bool {
	q := p.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting) == 0 && (q.delivered == q.begin || p.pos.next.Load() >= q.delivered)
}

// halt stops or resumes pop. It reports whether that changed anything.
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

// isHalted reports whether an operator paused the topic: no message of the partition may begin.
func (q *queue) isHalted() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.halted
}

// behindControl returns the offset after the last record, and its time, if no record waits; 0: a
// record waits, or none has arrived yet.
func (q *queue) behindControl() (int64, time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) > 0 || q.seenAt.IsZero() {
		return 0, time.Time{}
	}
	return q.seen, q.seenAt
}

// compare reports whether all records up to the end of the topic have arrived, whether fetching is
// stuck, that is, nothing arrived since the last call although it could have, and the offset up to
// which messages arrived.
func (p *partition) compare(end int64) (atEnd, stuck bool, delivered int64) {
	q := p.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	missing := end > q.seen && !q.paused && !q.ended && len(q.waiting) == 0
	stuck = missing && p.lookedAt.end > p.lookedAt.seen && p.lookedAt.seen == q.seen
	p.lookedAt.seen, p.lookedAt.end = q.seen, end
	if !missing {
		p.lookedAt.end = q.seen
	}
	return end <= q.seen, stuck, q.delivered
}
