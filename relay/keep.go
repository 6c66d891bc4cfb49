package relay

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// pulse is the time by which the worker of a shard must give its next sign of life. Each turn of
// its loop is one. Before a wait that ends by itself (a statement, the brokers, a call of a sink),
// the worker notes how long the wait may take.
type pulse struct {
	mu    sync.Mutex
	last  time.Time
	waits map[int]time.Time // current waits, each with its latest end
	n     int
}

// progressed is a sign of life.
func (p *publisher) progressed() {
	p.pulse.mu.Lock()
	p.pulse.last = time.Now()
	p.pulse.mu.Unlock()
	p.heartbeat()
}

// expect begins a wait of at most d. The caller calls ended when the wait is over, which is a sign
// of life.
func (p *publisher) expect(d time.Duration) (ended func()) {
	s := &p.pulse
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waits == nil {
		s.waits = map[int]time.Time{}
	}
	s.n++
	n := s.n
	s.waits[n] = time.Now().Add(d)
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.waits, n)
		s.last = time.Now()
	}
}

// late is how long the sign of life is overdue.
func (p *publisher) late() time.Duration {
	p.pulse.mu.Lock()
	defer p.pulse.mu.Unlock()
	due := p.pulse.last
	for _, until := range p.pulse.waits {
		if until.After(due) {
			due = until
		}
	}
	return time.Since(due)
}

// hungAfter is how long a sign of life may be overdue before the lease is no longer renewed.
func (c *Config) hungAfter() time.Duration { return max(c.Lease, 5*time.Second) }

// unacknowledgedMax is how long rows may be unacknowledged before the replica reports that it waits
// for the brokers.
func (c *Config) unacknowledgedMax() time.Duration {
	return min(max(c.Lease/2, time.Second), 10*time.Second)
}

// shouldRestart reports whether the work ended for a reason that waiting, or a new client, resolves, and
// that no other replica would handle better. Then the work begins again under the same lease.
func (p *publisher) shouldRestart(ctx context.Context, err error) bool {
	var alone *refusedAlone
	again := away(err) || errors.Is(err, errLimitsChanged) || errors.As(err, &alone)
	return again && !p.once && ctx.Err() == nil && p.lease.held()
}

// swap puts another publisher into a worker. The member does it, because it reads workers.
type swap struct {
	worker *worker
	next   *publisher
	done   chan struct{}
}

// runShard publishes a shard until its lease must be released, or is lost. When the brokers or a sink
// temporarily take no rows, the lease is kept: the work begins again from stored progress, under
// the same epoch.
func (m *member) runShard(ctx context.Context, w *worker, p *publisher) error {
	for n := 1; ; n++ {
		err := p.publish(ctx)
		if !p.restarts {
			m.waits(ctx, p.lease.shard, nil)
			return err
		}
		var alone *refusedAlone
		if p.worked.Load() || errors.As(err, &alone) { // each time another row is tried
			n = 1
		}
		wait := time.Duration(0)
		if away(err) {
			m.waits(ctx, p.lease.shard, err)
			wait = backoff(n)
			if m.cfg.Hooks.Interrupted != nil {
				m.cfg.Hooks.Interrupted(fmt.Errorf("shard %d: %w", p.lease.shard, err))
			}
		}
		next, err := m.again(ctx, p, wait)
		if err == nil {
			err = m.replace(ctx, w, next)
		}
		if err != nil {
			m.waits(ctx, p.lease.shard, nil)
			if !errors.Is(err, errLeaseLost) {
				end, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.cfg.Lease)
				defer cancel()
				m.giveBack(end, p.lease)
			}
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		p = next
	}
}

// again waits, and makes the publisher that continues from stored progress.
func (m *member) again(ctx context.Context, p *publisher, wait time.Duration) (*publisher, error) {
	defer p.expect(wait + m.cfg.Lease)()
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case err := <-p.lost:
		return nil, err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	l := p.lease // the member renews it concurrently, and reads nothing that resume changes
	if err := m.resume(ctx, l); err != nil {
		return nil, err
	}
	next := newPublisher(m.Relay, l)
	next.patience = p.patience
	// Bounds that hold for the rows of earlier polls hold for later ones.
	next.progress.seqSafe.Store(p.progress.seqSafe.Load())
	next.progress.seqRead.Store(p.progress.seqSafe.Load())
	return next, nil
}

// replace hands the next publisher to the member, which uses it from then on.
func (m *member) replace(ctx context.Context, w *worker, next *publisher) error {
	s := swap{w, next, make(chan struct{})}
	select {
	case m.swaps <- s:
		<-s.done
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// inspectWorkers notes which shards wait for the brokers, and which hang. It returns the leases
// that may be renewed.
func (m *member) inspectWorkers(ctx context.Context) (leases []*lease) {
	hung := 0
	for shard, w := range m.workers {
		p := w.publisher
		switch late := p.late(); {
		case late > m.cfg.hungAfter():
			hung++
			m.hangs(ctx, w, late)
			continue
		case w.hung:
			m.cfg.Logger.InfoContext(ctx, "a shard makes progress again", "relay", m.cfg.Name, "shard", shard)
			m.setHung(w, false)
		}
		leases = append(leases, w.lease)
		switch {
		case p.flight.unacknowledged() > m.cfg.unacknowledgedMax():
			m.waits(ctx, shard, errUnacknowledged)
		case p.worked.Load():
			m.waits(ctx, shard, nil)
		}
	}
	m.stuck = hung
	m.hung.Store(int64(hung))
	return leases
}

// hangs lets the lease of a shard expire whose worker gives no sign of life. Another replica then
// takes over the shard. The lease is not released, because the worker may still publish.
func (m *member) hangs(ctx context.Context, w *worker, late time.Duration) {
	if !w.hung {
		m.setHung(w, true)
	}
	m.say.about(ctx, fmt.Sprint(w.lease.shard), "a shard hangs, in a client or a sink that does not return: its lease is not renewed, another replica takes it over; restart this one",
		"relay", m.cfg.Name, "owner", m.cfg.Owner, "shard", w.lease.shard, "epoch", w.lease.epoch, "since", late.Round(time.Second))
}

func (m *member) setHung(w *worker, hung bool) {
	w.hung = hung
	if m.cfg.Hooks.Hung != nil {
		m.cfg.Hooks.Hung(w.lease.shard, hung)
	}
}
