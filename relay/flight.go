package relay

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// flight is what was handed over and is not acknowledged. Batches leave it from the front, so that what is
// acknowledged is always a prefix of what was read.
type flight struct {
	bytesMax int
	waits    func()            // at each turn of a wait
	acked    func(rows []*row) // rows left the front, in order; called under the lock

	mu       sync.Mutex
	changed  chan struct{} // closed and replaced at every change of what is below
	batches  []*batch      // oldest first
	since    time.Time     // of the last acknowledgement while batches are there
	bytes    int
	failure  error   // of a record: everything in flight is void from here on
	end      *cursor // behind the last batch of the acknowledged prefix; nil: nothing new
	rowsDone int64   // of the acknowledged prefix, since take
}

// batch is rows that were handed over together.
type batch struct {
	rows    []*row // as long as the records
	records []*kgo.Record
	pending int
	bytes   int
	// end is where progress may move to; the zero value moves it nowhere.
	end cursor
}

func newFlight(bytesMax int) *flight {
	return &flight{bytesMax: bytesMax, changed: make(chan struct{})}
}

// add puts a batch behind those in flight. One with nothing pending (an empty page that moved the floor) is acknowledged as
// soon as those before it are.
func (f *flight) add(b *batch) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.batches) == 0 {
		f.since = time.Now()
	}
	f.batches = append(f.batches, b)
	f.bytes += b.bytes
	if b.pending == 0 {
		f.advance()
	}
}

// settle is called for each record of a batch when the brokers have answered.
func (f *flight) settle(b *batch, failure error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if failure != nil && f.failure == nil {
		f.failure = failure
		f.notify()
	}
	b.pending--
	if b.pending == 0 {
		f.advance()
	}
}

// advance takes acknowledged batches off the front. After a failure nothing counts as acknowledged any
// more: the rows are read again from the stored progress.
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

// take returns how far progress may move, nil if nowhere, and how many rows were acknowledged, and forgets both.
func (f *flight) take() (*cursor, int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	end, rows := f.end, f.rowsDone
	f.end, f.rowsDone = nil, 0
	return end, rows
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

// room waits until less than the limit is in flight, and reports a failed record.
func (f *flight) room(ctx context.Context) error {
	for {
		s := f.state()
		if s.failure != nil || s.bytes < f.bytesMax {
			return s.failure
		}
		if err := f.wait(ctx, s.changed); err != nil {
			return err
		}
	}
}

// settled waits until nothing is in flight.
func (f *flight) settled(ctx context.Context) error {
	for {
		s := f.state()
		if s.failure != nil || s.pages == 0 {
			return s.failure
		}
		if err := f.wait(ctx, s.changed); err != nil {
			return fmt.Errorf("%d pages are not acknowledged; they are published again: %w", s.pages, err)
		}
	}
}

// unacknowledged is how long rows wait for an acknowledgement; 0: there are none.
func (f *flight) unacknowledged() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.batches) == 0 {
		return 0
	}
	return time.Since(f.since)
}

// turnEvery is how often what waits for acknowledgements gives a sign of life.
const turnEvery = time.Second

// wait waits for an acknowledgement. While none comes the member says so: see member.look.
func (f *flight) wait(ctx context.Context, changed <-chan struct{}) error {
	timer := time.NewTicker(turnEvery)
	defer timer.Stop()
	for {
		f.waits()
		select {
		case <-changed:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
		}
	}
}
