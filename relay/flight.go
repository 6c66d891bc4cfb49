package relay

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// flight holds rows that were handed over and are not acknowledged. Batches leave it from the
// front, so what is acknowledged is always a prefix of what was read.
type flight struct {
	bytesMax int
	void     context.CancelCauseFunc // called at the failure
	waits    func()                  // called at each turn of a wait
	acked    func(rows []*row)       // rows left the front, in order; called under the lock

	mu       sync.Mutex
	changed  chan struct{} // closed and replaced when a field below changes
	batches  []*batch      // oldest first
	since    time.Time     // time of the last acknowledgement or answer while something waits for one
	asked    int           // requests that wait for an answer, besides batches
	bytes    int
	failure  error   // of a record: from then on everything in flight is void
	end      *cursor // behind the last batch of the acknowledged prefix; nil: nothing new
	rowsDone int64   // of the acknowledged prefix, since take
}

// batch is rows that were handed over together.
type batch struct {
	rows    []*row // as many as records
	records []*kgo.Record
	pending int
	bytes   int
	// end is where progress may move to; the zero value moves it nowhere.
	end      cursor
	released bool // the rows are from outbox_dead
}

func newFlight(bytesMax int, void context.CancelCauseFunc) *flight {
	return &flight{bytesMax: bytesMax, void: void, changed: make(chan struct{})}
}

// add puts a batch behind those in flight. A batch with nothing pending (an empty page that moved
// the floor) is acknowledged as soon as the batches before it are.
func (f *flight) add(b *batch) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.begins()
	f.batches = append(f.batches, b)
	f.bytes += b.bytes
	if b.pending == 0 {
		f.advance()
	}
}

// begins notes when the wait for the brokers began.
func (f *flight) begins() {
	if len(f.batches)+f.asked == 0 {
		f.since = time.Now()
	}
}

// awaits notes a request to the brokers, until the caller calls answered.
func (f *flight) awaits() (answered func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.begins()
	f.asked++
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.asked--
		f.since = time.Now()
	}
}

// settle is called for each record of a batch when the brokers have answered.
func (f *flight) settle(b *batch, failure error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if failure != nil {
		f.fail(failure)
	}
	b.pending--
	if b.pending == 0 {
		f.advance()
	}
}

// makeVoid fails the flight without a record.
func (f *flight) makeVoid(failure error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail(failure)
}

func (f *flight) fail(failure error) {
	if f.failure == nil {
		f.failure = failure
		f.void(failure)
		f.notify()
	}
}

// advance removes acknowledged batches from the front. After a failure nothing more counts as
// acknowledged: the rows are read again from stored progress.
func (f *flight) advance() {
	for len(f.batches) > 0 && f.batches[0].pending == 0 && f.failure == nil {
		b := f.batches[0]
		f.batches = f.batches[1:]
		f.since = time.Now()
		f.bytes -= b.bytes
		f.rowsDone += int64(len(b.rows))
		f.acked(b.rows)
		if b.end.from != nil {
			end := b.end
			f.end = &end
		}
		f.notify()
	}
}

func (f *flight) notify() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// takeProgress returns how far progress may move (nil: nowhere) and how many rows were
// acknowledged, and resets both.
func (f *flight) takeProgress() (*cursor, int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	end, rows := f.end, f.rowsDone
	f.end, f.rowsDone = nil, 0
	return end, rows
}

// unstored counts the rows that are not covered by progress.
func (f *flight) unstored() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	rows := f.rowsDone
	for _, b := range f.batches {
		rows += int64(len(b.rows))
	}
	return rows
}

// flightState is what waiters wait for; changed is closed when it is out of date.
type flightState struct {
	pages, bytes int
	failure      error
	movable      bool // progress may move
	changed      <-chan struct{}
}

func (f *flight) state() flightState {
	f.mu.Lock()
	defer f.mu.Unlock()
	return flightState{pages: len(f.batches), bytes: f.bytes, failure: f.failure, movable: f.end != nil, changed: f.changed}
}

// room waits until less than the limit is in flight, and returns the failure of a record.
func (f *flight) room(ctx context.Context) error {
	return f.until(ctx, func(s flightState) bool { return s.bytes < f.bytesMax })
}

// settled waits until nothing is in flight.
func (f *flight) settled(ctx context.Context) error {
	return f.until(ctx, func(s flightState) bool { return s.pages == 0 })
}

// unacknowledged is how long rows, or requests, wait for the brokers; 0: there are none.
func (f *flight) unacknowledged() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.batches)+f.asked == 0 {
		return 0
	}
	return time.Since(f.since)
}

// signOfLifeEvery is how often a wait for acknowledgements gives a sign of life.
const signOfLifeEvery = time.Second

// until waits for acknowledgements. While none comes, the member reports that: see inspectWorkers.
func (f *flight) until(ctx context.Context, over func(flightState) bool) error {
	for {
		s := f.state()
		if s.failure != nil || over(s) {
			return s.failure
		}
		f.waits()
		select {
		case <-s.changed:
		case <-ctx.Done():
			return fmt.Errorf("%d pages are not acknowledged; they are published again: %w", s.pages, ctx.Err())
		case <-time.After(signOfLifeEvery):
		}
	}
}
