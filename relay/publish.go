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

// publisher is the work on one shard under one lease: one goroutine reads and produces in order, the client's
// goroutine counts acknowledgements, one goroutine stores progress, one watches the lease.
type publisher struct {
	*Relay
	lease  *lease
	client *kgo.Client // nil with a sink
	topics *topics
	life   context.Context      //nolint:containedctx // of the work: it ends when something failed, not when it is to stop
	once   bool                 // end as soon as nothing waits
	rest   atomic.Bool          // read nothing new, at the end of a batch, until it is false or until is set …
	rests  atomic.Bool          // … which is so
	until  atomic.Pointer[tick] // end there, and keep the lease; nil: go on
	lost   chan error           // somebody says that the lease is gone
	ended  atomic.Bool          // at until
	exact  *transaction         // nil: at least once

	read cursor // what the next page starts behind
	// seqRead is the last seq that was given out when the last statement ran. seqSafe is what it was before
	// progress was stored, or the lease taken, last. A row has its transaction id before its seq, and storing progress took a
	// later transaction id and has committed, so every snapshot from then on has an xmax above the ids of
	// all rows up to seqSafe. (The snapshot alone does not tell: its xmax is not the next id, but the
	// one after the last that has ended; transactions that run beyond it are not in xip.)
	seqRead, seqSafe atomic.Int64
	mark             floorMark // when the floor may move
	quiet            bool      // the last page had no rows
	deadExist        bool      // outbox_dead may have rows of this relay
	looked           time.Time // when dead rows were looked at last
	reviving         bool      // there were more to publish
	reviveLimit      int       // rows of the next page of them
	laid             int       // rows that became dead since
	bytesMax         int       // in flight: this shard's share
	patience         time.Duration

	mu        sync.Mutex
	changed   chan struct{} // closed and replaced at every change of what is below
	batches   []*batch      // in flight, oldest first
	bytes     int           // of the batches in flight
	failure   error         // of a record: everything in flight is void from here on
	acked     *cursor       // behind the last batch of the acknowledged prefix; nil: nothing new
	ackedRows int64
	created   []time.Time // of tellDelivered

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

func newPublisher(r *Relay, l *lease) *publisher {
	p := &publisher{
		Relay: r, lease: l, patience: r.patience, topics: newTopics(), lost: make(chan error, 1),
		read: l.cursor, changed: make(chan struct{}), bytesMax: max(64<<10, r.cfg.InFlightBytesMax/int(l.shards)),
		mark: floorMark{xmax: l.cursor.from.xmax, seqLast: l.cursor.from.seqLast},
	}
	p.seqSafe.Store(l.seq)
	p.seqRead.Store(l.seq)
	return p
}

// lose ends the work at once; what it does afterwards changes nothing, because of the epoch.
func (p *publisher) lose(err error) {
	select {
	case p.lost <- err:
	default:
	}
}

// publish works until ctx ends, the lease is lost or something fails; with once, until nothing waits; with
// until, up to that tick.
func (p *publisher) publish(ctx context.Context) error {
	err := p.work(ctx)
	if !errors.Is(err, errLeaseLost) && !p.ended.Load() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.cfg.Lease)
		defer cancel()
		p.giveBack(end, p.lease)
	}
	return err
}

func (p *publisher) work(ctx context.Context) error {
	if p.cfg.Sink == nil {
		client, err := p.newClient(p.lease, p.topics)
		if err != nil {
			return err
		}
		p.client = client
		defer client.Close()
	}

	// What is under way when ctx ends may still be acknowledged and stored: this context ends later.
	work, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	group, groupCtx := errgroup.WithContext(work)
	p.life = groupCtx
	reading, stopReading := context.WithCancel(groupCtx)
	defer stopReading()
	defer context.AfterFunc(ctx, stopReading)()
	keeping, stopKeeping := context.WithCancel(groupCtx)
	storing, stopStoring := context.WithCancel(groupCtx)

	group.Go(func() error { return p.lease.watch(keeping) })
	group.Go(func() error {
		select {
		case err := <-p.lost:
			return err
		case <-keeping.Done():
			return nil
		}
	})
	if p.cfg.ExactlyOnce {
		if err := p.beginExactlyOnce(reading); err != nil {
			stopKeeping()
			stopStoring()
			return errors.Join(err, group.Wait())
		}
		defer p.abort(ctx)
	} else {
		group.Go(func() error { return p.storeProgress(storing) })
	}
	group.Go(func() error {
		defer stopKeeping()
		defer stopStoring()
		if err := p.loop(reading); err != nil && reading.Err() == nil {
			return err
		}
		// Told to stop, or nothing left to read: what is with the brokers may still be acknowledged.
		drain, cancel := context.WithTimeout(groupCtx, p.cfg.DrainMax)
		defer cancel()
		if p.exact != nil {
			return p.commit(drain)
		}
		return p.settled(drain)
	})
	err := group.Wait()
	if end := p.until.Load(); err == nil && end != nil && p.read.from == end && p.read.to == nil {
		p.ended.Store(true)
	}
	return err
}

// loop reads pages and produces them, as long as there is room in flight. Behind a full page the next one
// is read while this one is produced: the database and this process work at the same time.
func (p *publisher) loop(ctx context.Context) error {
	if err := p.lookForDead(ctx); err != nil {
		return err
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
	p.reviveLimit = limit
	for ctx.Err() == nil {
		p.turn()
		if err := p.reviveDead(ctx); err != nil {
			return err
		}
		if err := p.room(ctx); err != nil {
			return err
		}
		if ahead == nil {
			if p.read = p.bounded(p.read); p.read.from == p.until.Load() {
				return nil
			}
			if p.resting() {
				p.wakeable(ctx, p.cfg.PollMin, p.wake.next())
				continue
			}
			ahead = p.fetchAhead(ctx, p.read, limit)
		}
		next := <-ahead
		ahead = nil
		if next.err != nil {
			return next.err
		}
		page := next.page
		crashpoint.Here(crashpoint.RelayRead)
		p.quiet = len(page.rows) == 0
		limit = p.nextLimit(limit, page)
		end := p.read.next(page, next.seen)
		if page.full {
			ahead = p.fetchAhead(ctx, end, limit)
		} else {
			end.floor = p.mark.advance(end.from, end.floor)
		}
		if err := p.hand(ctx, page, end); err != nil {
			return err
		}
		complete := p.read.to == nil // up to now, not up to an earlier tick
		p.read = end
		p.seqRead.Store(page.seqLast)
		if p.exact != nil && p.exact.due(page.full) {
			if err := p.commit(ctx); err != nil {
				return err
			}
		}
		switch {
		case page.full, p.reviving:
			continue
		case len(page.rows) > 0:
			idle = p.cfg.PollMin
		case p.once && complete:
			return nil
		default:
			idle = min(2*idle, p.cfg.PollMax)
		}
		p.wakeable(ctx, idle, next.woken)
	}
	return nil
}

// bounded makes the next batch end at until, if there is one.
func (p *publisher) bounded(c cursor) cursor {
	if end := p.until.Load(); end != nil && c.to == nil && c.from != end {
		c.to, c.seq = end, 0
	}
	return c
}

// resting tells whether the next batch has to wait. Whatever was read is before a tick that is taken from now on.
func (p *publisher) resting() bool {
	rests := p.rest.Load() && p.until.Load() == nil && p.read.to == nil
	p.rests.Store(rests)
	return rests
}

// wakeable is a pause that Wake ends early, which closes woken.
func (p *publisher) wakeable(ctx context.Context, d time.Duration, woken <-chan struct{}) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-woken:
	}
}

// fetched is the outcome of a statement.
type fetched struct {
	page *page
	seen *tick
	err  error
	// woken is closed by a Wake since the statement was sent, which may not have seen what that was about.
	woken <-chan struct{}
}

func (p *publisher) fetchAhead(ctx context.Context, c cursor, limit int) <-chan fetched {
	result := make(chan fetched, 1)
	woken := p.wake.next()
	go func() {
		page, seen, err := p.fetch(ctx, c, limit)
		result <- fetched{page, seen, err, woken}
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
	case end.floor > p.read.floor, p.read.to != nil && end.to == nil: // the end of a batch that took several pages
		p.enqueue(&batch{end: end})
	}
	return nil
}

// nextLimit lets pages grow to PageRowsMax while their rows are small, so that a page of large rows
// takes no more memory than a page of small ones.
func (p *publisher) nextLimit(limit int, page *page) int {
	if len(page.rows) == 0 {
		return limit
	}
	fit := p.bytesMax / 4 / max(1, page.bytes/len(page.rows))
	return max(1, min(4*limit, fit, p.cfg.PageRowsMax))
}

// produce hands a page to the client. Rows that Kafka cannot take leave the stream here.
func (p *publisher) produce(ctx context.Context, page *page, end cursor) error {
	sorted, err := p.sort(ctx, page.rows)
	if err != nil {
		return err
	}
	if p.exact != nil && p.anySuspect(sorted.rows) {
		return p.produceAlone(ctx, sorted, end)
	}
	if p.exact != nil && len(sorted.dead) > 0 {
		return p.produceBesideDead(ctx, sorted, page.bytes, end)
	}
	if p.cfg.Sink != nil {
		return p.feedPage(ctx, sorted, end)
	}
	b := &batch{rows: sorted.rows, records: sorted.records, bytes: page.bytes, end: end}
	if !p.anySuspect(b.rows) && len(sorted.dead) == 0 {
		return p.send(ctx, b)
	}
	// Progress must not pass a dead row before it is buried: everything before it is settled first.
	b.end = cursor{}
	if p.anySuspect(b.rows) {
		if err := p.sendSuspects(ctx, sorted); err != nil {
			return err
		}
	} else if err := p.send(ctx, b); err != nil {
		return err
	}
	if err := p.settled(ctx); err != nil {
		return err
	}
	return p.bury(ctx, sorted.dead, end)
}

// inside returns where progress may be behind each row of a page that was read at p.read and ends at end.
func (p *publisher) inside(end cursor) func(*row) cursor {
	c := cursor{from: p.read.from, to: end.to, floor: p.read.floor}
	if c.to == nil {
		c.to = end.from
	}
	return func(r *row) cursor {
		c.seq = r.seq
		return c
	}
}

// send produces records in order.
func (p *publisher) send(ctx context.Context, b *batch) error {
	if err := p.open(); err != nil {
		return err
	}
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
	return nil
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
		p.tellDelivered(b.rows)
		if b.end.from != nil {
			end := b.end
			p.acked = &end
		}
		p.notify()
	}
}

// tellDelivered tells the hook of rows, those of one topic that follow each other together.
func (p *publisher) tellDelivered(rows []*row) {
	if p.cfg.Hooks.Delivered == nil {
		return
	}
	for i, r := range rows {
		p.created = append(p.created, r.created)
		if i == len(rows)-1 || rows[i+1].topic != r.topic {
			p.cfg.Hooks.Delivered(r.topic, p.created)
			p.created = p.created[:0]
		}
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
		if f.failure != nil || f.bytes < p.bytesMax {
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
