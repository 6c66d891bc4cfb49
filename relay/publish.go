package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/internal/crashpoint"
)

// publisher is the work under one lease: one goroutine reads and produces in order, the client's
// goroutine counts acknowledgements, one goroutine stores progress, one keeps the lease.
type publisher struct {
	*Relay
	lease  *lease
	client *kgo.Client
	topics *topics

	read cursor // what the next page starts behind
	// seqRead is the last seq that was given out when the last statement ran. seqSafe is what it was before
	// progress was stored, or the lease taken, last. A row has its transaction id before its seq, and storing progress took a
	// later transaction id and has committed, so every snapshot from then on has an xmax above the ids of
	// all rows up to seqSafe. (The snapshot alone does not tell: its xmax is not the next id, but the
	// one after the last that has ended; transactions that run beyond it are not in xip.)
	seqRead, seqSafe atomic.Int64
	mark             floorMark // when the floor may move
	deadExist        bool      // outbox_dead may have rows of this relay
	looked           time.Time // when dead rows were looked at last

	mu        sync.Mutex
	changed   chan struct{} // closed and replaced at every change of what is below
	batches   []*batch      // in flight, oldest first
	bytes     int           // of the batches in flight
	failure   error         // of a record: everything in flight is void from here on
	acked     *cursor       // behind the last batch of the acknowledged prefix; nil: nothing new
	ackedRows int64

	storing   sync.Mutex // one write of progress at a time: an older one must not land after a newer
	published int64      // rows whose progress is stored
}

// batch is a page that was handed to the client.
type batch struct {
	rows    []*row // as long as the records
	records []*kgo.Record
	pending int
	bytes   int
	// end is where progress may move to; the zero value moves it nowhere.
	end cursor
}

// publish works until ctx ends, the lease is lost or something fails. With once it returns as soon as
// nothing waits. It returns the number of rows whose progress was stored.
func (r *Relay) publish(ctx context.Context, l *lease, once bool) (int64, error) {
	p := &publisher{
		Relay: r, lease: l, topics: newTopics(),
		read: l.cursor, changed: make(chan struct{}),
		mark: floorMark{xmax: l.cursor.from.xmax, seqLast: l.cursor.from.seqLast},
	}
	p.seqSafe.Store(l.seq)
	p.seqRead.Store(l.seq)
	client, err := r.newClient(p.topics)
	if err != nil {
		return 0, err
	}
	p.client = client
	defer client.Close()

	// What is under way when ctx ends may still be acknowledged and stored: this context ends later.
	work, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	group, groupCtx := errgroup.WithContext(work)
	reading, stopReading := context.WithCancel(groupCtx)
	defer context.AfterFunc(ctx, stopReading)()
	keeping, stopKeeping := context.WithCancel(groupCtx)
	storing, stopStoring := context.WithCancel(groupCtx)

	group.Go(func() error { return r.keepLease(keeping, l) })
	group.Go(func() error { return p.storeProgress(storing) })
	group.Go(func() error {
		defer stopKeeping()
		defer stopStoring()
		if err := p.loop(reading, once); err != nil && reading.Err() == nil {
			return err
		}
		// Told to stop, or nothing left to read: what is with the brokers may still be acknowledged.
		drain, cancel := context.WithTimeout(groupCtx, r.cfg.DrainMax)
		defer cancel()
		return p.settled(drain)
	})
	err = group.Wait()
	stopReading()
	if !errors.Is(err, errLeaseLost) {
		end, cancelEnd := context.WithTimeout(context.WithoutCancel(ctx), r.cfg.Lease)
		defer cancelEnd()
		r.giveBack(end, l)
	}
	return p.published, err
}

// loop reads pages and produces them, as long as there is room in flight. Behind a full page the next one
// is read while this one is produced: the database and this process work at the same time.
func (p *publisher) loop(ctx context.Context, once bool) error {
	if err := p.pool.QueryRow(ctx, p.sql.deadExist, p.cfg.Name).Scan(&p.deadExist); err != nil {
		return fmt.Errorf("look for dead rows: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	var ahead <-chan fetched
	defer func() {
		cancel()
		if ahead != nil {
			<-ahead
		}
	}()
	idle := p.cfg.PollMin
	limit := min(100, p.cfg.PageRowsMax)
	for ctx.Err() == nil {
		p.turn()
		if err := p.reviveDead(ctx); err != nil {
			return err
		}
		if err := p.room(ctx); err != nil {
			return err
		}
		if ahead == nil {
			ahead = p.fetchAhead(ctx, p.read, limit)
		}
		next := <-ahead
		ahead = nil
		if next.err != nil {
			return next.err
		}
		page := next.page
		crashpoint.Here(crashpoint.RelayRead)
		limit = nextLimit(limit, page, p.cfg)
		end := p.read.next(page, next.seen)
		if page.full {
			ahead = p.fetchAhead(ctx, end, limit)
		} else {
			end.floor = p.mark.advance(end.from, end.floor)
		}
		if err := p.hand(ctx, page, end); err != nil {
			return err
		}
		p.read = end
		p.seqRead.Store(page.seqLast)
		switch {
		case page.full:
			continue
		case len(page.rows) > 0:
			idle = p.cfg.PollMin
		case once:
			return nil
		default:
			idle = min(2*idle, p.cfg.PollMax)
		}
		pause(ctx, idle)
	}
	return nil
}

// fetched is the outcome of a statement.
type fetched struct {
	page *page
	seen *tick
	err  error
}

func (p *publisher) fetchAhead(ctx context.Context, c cursor, limit int) <-chan fetched {
	result := make(chan fetched, 1)
	go func() {
		page, seen, err := p.fetch(ctx, c, limit, p.seqSafe.Load())
		result <- fetched{page, seen, err}
	}()
	return result
}

// hand produces a page, if it has rows, under a lease that is certain.
func (p *publisher) hand(ctx context.Context, page *page, end cursor) error {
	switch {
	case len(page.rows) > 0 && !p.lease.held():
		return errLeaseLost
	case len(page.rows) > 0:
		return p.produce(ctx, page, end)
	case end.floor > p.read.floor:
		p.enqueue(&batch{end: end})
	}
	return nil
}

// nextLimit lets pages grow to PageRowsMax while their rows are small, so that a page of large rows
// takes no more memory than a page of small ones.
func nextLimit(limit int, p *page, cfg Config) int {
	if len(p.rows) == 0 {
		return limit
	}
	fit := cfg.InFlightBytesMax / 4 / max(1, p.bytes/len(p.rows))
	return max(1, min(4*limit, fit, cfg.PageRowsMax))
}

// produce hands a page to the client. Rows that Kafka cannot take leave the stream here.
func (p *publisher) produce(ctx context.Context, page *page, end cursor) error {
	sorted, err := p.sort(ctx, page.rows)
	if err != nil {
		return err
	}
	b := &batch{rows: sorted.rows, records: sorted.records, bytes: page.bytes, end: end}
	if !p.anySuspect(b.rows) && len(sorted.dead) == 0 {
		p.send(ctx, b)
		return nil
	}
	// Progress must not pass a dead row before it is buried: everything before it is settled first.
	b.end = cursor{}
	if p.anySuspect(b.rows) {
		if err := p.sendSuspects(ctx, sorted); err != nil {
			return err
		}
	} else {
		p.send(ctx, b)
	}
	if err := p.settled(ctx); err != nil {
		return err
	}
	return p.bury(ctx, sorted.dead, end)
}

// send produces records in order.
func (p *publisher) send(ctx context.Context, b *batch) {
	b.pending = len(b.records)
	p.enqueue(b)
	promise := func(record *kgo.Record, err error) { p.settle(b, record, err) }
	// Not cancelled with ctx: a cancelled record would leave a hole in front of those behind it. What is
	// not acknowledged when the relay gives up is dropped with the client.
	ctx = context.WithoutCancel(ctx)
	for _, record := range b.records {
		p.client.Produce(ctx, record, promise)
	}
	crashpoint.Here(crashpoint.RelayProduced)
}

// settle is called for each record when the brokers have answered.
func (p *publisher) settle(b *batch, record *kgo.Record, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		if refused(err) {
			p.suspect(b.rows[slices.Index(b.records, record)].seq)
		}
		if p.failure == nil {
			p.failure = fmt.Errorf("produce to topic %q: %w", record.Topic, err)
			p.notify()
		}
	}
	b.pending--
	if b.pending == 0 {
		p.advance()
	}
}

// enqueue puts a batch behind those in flight. One without records (an empty page that moved the
// floor) is acknowledged as soon as those before it are.
func (p *publisher) enqueue(b *batch) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.batches = append(p.batches, b)
	p.bytes += b.bytes
	if b.pending == 0 {
		p.advance()
	}
}

// advance takes acknowledged batches off the front. After a failure nothing counts as acknowledged any
// more: the rows are read again from the stored progress.
func (p *publisher) advance() {
	for len(p.batches) > 0 && p.batches[0].pending == 0 && p.failure == nil {
		b := p.batches[0]
		p.batches = p.batches[1:]
		p.bytes -= b.bytes
		p.ackedRows += int64(len(b.rows))
		if p.cfg.Hooks.Delivered != nil {
			for _, r := range b.rows {
				p.cfg.Hooks.Delivered(r.topic, r.created)
			}
		}
		if b.end.from != nil {
			end := b.end
			p.acked = &end
		}
		p.notify()
	}
}

func (p *publisher) notify() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// flight is what waiters wait for; changed is closed when it is out of date.
type flight struct {
	pages, bytes int
	failure      error
	acked        bool
	changed      <-chan struct{}
}

func (p *publisher) inFlight() flight {
	p.mu.Lock()
	defer p.mu.Unlock()
	return flight{pages: len(p.batches), bytes: p.bytes, failure: p.failure, acked: p.acked != nil, changed: p.changed}
}

// room waits until less than the limit is in flight, and reports a failed record.
func (p *publisher) room(ctx context.Context) error {
	for {
		f := p.inFlight()
		if f.failure != nil || f.bytes < p.cfg.InFlightBytesMax {
			return f.failure
		}
		if err := p.wait(ctx, f.changed); err != nil {
			return err
		}
	}
}

// settled waits until nothing is in flight.
func (p *publisher) settled(ctx context.Context) error {
	for {
		f := p.inFlight()
		if f.failure != nil || f.pages == 0 {
			return f.failure
		}
		if err := p.wait(ctx, f.changed); err != nil {
			return fmt.Errorf("%d pages are not acknowledged; they are published again: %w", f.pages, err)
		}
	}
}

// complaintEvery is how often a relay that waits for brokers says so.
const complaintEvery = 10 * time.Second

func (p *publisher) wait(ctx context.Context, changed <-chan struct{}) error {
	timer := time.NewTicker(complaintEvery)
	defer timer.Stop()
	for {
		p.turn()
		select {
		case <-changed:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
			p.cfg.Logger.WarnContext(ctx, "waiting for Kafka to acknowledge; nothing is lost, rows wait in the outbox", "relay", p.cfg.Name)
		}
	}
}
