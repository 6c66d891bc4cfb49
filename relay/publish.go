package relay

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/internal/nap"
	"github.com/effectonce/effectonce/internal/pause"
)

// publisher is the work on one shard under one lease. One goroutine reads pages and makes attempts
// to publish them, in order (loop). The client's goroutine counts acknowledgements (flight). One
// goroutine stores progress; one watches the lease.
type publisher struct {
	*Relay
	lease    *lease
	reader   *reader
	flight   *flight
	progress *progress
	dead     *deadRows
	topics   *topics
	client   *kgo.Client // nil with a sink
	target   target
	once     bool // end as soon as no row waits
	patience time.Duration
	created  []time.Time // buffer of acknowledged
	pulse    pulse
	worked   atomic.Bool     // rows were acknowledged, or none waited
	napper   *nap.Napper     // used by loop
	valid    context.Context // of all records; ends when what is in flight is void
	refusing sync.Once       // see takeCare
	alone    atomic.Bool     // rows are produced one by one, so that nothing is behind one that fails
}

func newPublisher(r *Relay, l *lease) *publisher {
	p := &publisher{Relay: r, lease: l, patience: r.patience, topics: &topics{Relay: r, known: map[string]topicState{}, given: map[string]int32{}}, progress: newProgress(r, l)}
	valid, void := context.WithCancelCause(context.Background()) //nolint:forbidigo // records outlive every caller's context: see send
	p.valid, p.flight = valid, newFlight(max(64<<10, r.cfg.InFlightBytesMax/int(l.shards)), void)
	p.pulse.last = time.Now()
	p.flight.waits, p.flight.acked = p.progressed, p.acknowledged
	p.reader = newReader(p)
	l.obeys.Store(r.paused.Load()) // safe: nothing is in flight
	p.dead = &deadRows{publisher: p, limit: p.reader.limit, look: &deadLook{publisher: p}}
	return p
}

// publish works until ctx ends, the lease is lost or something fails. Then it releases the lease. With
// once it ends when no row waits.
func (p *publisher) publish(ctx context.Context) error {
	err := p.publishShard(ctx)
	if !errors.Is(err, errLeaseLost) {
		p.giveBack(ctx, p.lease)
	}
	return err
}

func (p *publisher) publishShard(ctx context.Context) error {
	if p.cfg.Sink == nil {
		client, err := p.newClient(p.lease, p.producing()...)
		if err != nil {
			return err
		}
		p.client = client
		defer client.Close()
	}

	// Rows in flight when ctx ends may still be acknowledged and stored: this context ends later.
	whole, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	p.napper = nap.New()
	defer p.napper.Close()
	group, work := errgroup.WithContext(whole)
	reading, stopReading := context.WithCancel(work)
	defer stopReading()
	defer context.AfterFunc(ctx, stopReading)()
	keeping, stopKeeping := context.WithCancel(work)
	storing, stopStoring := context.WithCancel(work)

	group.Go(func() error { return p.lease.watch(keeping) })
	group.Go(func() error { return p.listen(keeping) })
	err := p.aim(reading)
	if err == nil {
		err = p.dead.look.begin(reading)
	}
	if err != nil {
		stopKeeping()
		stopStoring()
		return errors.Join(err, group.Wait())
	}
	if t, ok := p.target.(*toTransactions); ok {
		defer func() {
			if err := t.abort(ctx, abortMax); err != nil {
				t.say.warn(ctx, "a transaction was left open; the next publisher of the shard aborts it", "relay", t.cfg.Name, "shard", t.lease.shard, "error", err)
			}
		}()
	}
	group.Go(func() error { return p.storeProgress(storing) })
	if !p.once {
		group.Go(func() error { return p.dead.look.poll(keeping) })
	}
	group.Go(func() error {
		defer stopKeeping()
		defer stopStoring()
		if err := p.loop(work, reading); err != nil && reading.Err() == nil {
			return err
		}
		drain, cancel := context.WithTimeout(work, p.cfg.DrainMax) // for what the brokers may still acknowledge
		defer cancel()
		return p.target.finish(work, drain)
	})
	return group.Wait()
}

// aim chooses the target.
func (p *publisher) aim(ctx context.Context) error {
	switch {
	case p.cfg.Sink != nil:
		p.target = toSink{toKafka{p}}
	case p.cfg.ExactlyOnce:
		t := &toTransactions{publisher: p}
		p.target = t
		return t.begin(ctx)
	default:
		p.target = toKafka{p}
	}
	return nil
}

// storeProgress writes progress at most every ProgressEvery until ctx ends, and once more after
// that for the last acknowledgements.
func (p *publisher) storeProgress(ctx context.Context) error {
	for more := true; more; {
		more = pause.For(ctx, p.cfg.ProgressEvery)
		err := p.target.store(ctx)
		if err == nil && more {
			err = p.progress.clear(ctx)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// loop reads pages and publishes them while there is room in flight.
func (p *publisher) loop(work, ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer p.reader.stop()
	defer cancel()
	looked := false
	for ctx.Err() == nil {
		p.progressed()
		if err := p.followPauses(work, ctx); err != nil {
			return err
		}
		if err := p.release(work, ctx); err != nil {
			return err
		}
		if err := p.flight.room(ctx); err != nil {
			return err
		}
		read, err := p.reader.next(ctx)
		if err != nil {
			return err
		}
		if err := p.hand(work, ctx, read); err != nil {
			return err
		}
		p.reader.at = read.end
		p.progress.seqRead.Store(read.page.seqLast)
		if len(read.page.rows) == 0 && p.flight.state().pages == 0 {
			p.worked.Store(true)
		}
		due, err := p.target.afterPage(work, ctx, read.page.full)
		if err != nil {
			return err
		}
		switch {
		case read.page.full, p.dead.releasing:
			continue
		case p.once && read.complete && len(read.page.rows) == 0:
			if looked {
				return nil
			}
			looked = true // one round: rows that are refused again wait for the next Drain
			ended := p.expect(2 * p.patience)
			_, err := p.dead.look.round(ctx)
			if ended(); err != nil {
				return err
			}
			continue
		}
		p.sleep(ctx, min(due, p.reader.pace.wait), read.woken)
	}
	return nil
}

// sleep pauses for d. Wake ends the pause early by closing woken, unless the pause is a nap.
func (p *publisher) sleep(ctx context.Context, d time.Duration, woken <-chan struct{}) {
	if d <= nap.Max {
		p.napper.Nap(d)
		return
	}
	defer p.expect(d)()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-woken:
	}
}

// hand publishes a page, if it has rows, while the lease is certain to be held.
func (p *publisher) hand(work, ctx context.Context, read *fetched) error {
	at := p.reader.at
	switch {
	case len(read.page.rows) > 0 && !p.lease.held():
		return errLeaseLost
	case len(read.page.rows) > 0:
		a, err := p.try(ctx, read.page, at, read.end)
		if errors.Is(err, errLimitsChanged) { // the pages before this one must not be published again
			return errors.Join(p.target.finish(work, ctx), err)
		}
		if err != nil {
			return err
		}
		err = p.target.publish(work, ctx, a)
		read.end = a.end // it may leave rows of the page out: see tryEach
		return err
	case read.end.floor > at.floor, at.to != nil && read.end.to == nil: // the end of a batch that took several pages
		return p.target.publish(work, ctx, &attempt{from: at, end: read.end})
	}
	return nil
}

// acknowledged is called when rows leave the flight. It calls the hook once for each run of consecutive
// rows of one topic.
func (p *publisher) acknowledged(rows []*row) {
	if len(rows) > 0 {
		p.worked.Store(true)
	}
	for i, r := range rows {
		if p.created = append(p.created, r.created); i < len(rows)-1 && rows[i+1].topic == r.topic {
			continue
		}
		if p.cfg.Hooks.Delivered != nil {
			p.cfg.Hooks.Delivered(r.topic, p.created)
		}
		p.created = p.created[:0]
	}
}
