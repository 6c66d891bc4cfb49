package relay

import (
	"context"
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
	waits map[*time.Time]bool // the latest end of each current wait
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
		s.waits = map[*time.Time]bool{}
	}
	until := time.Now().Add(d)
	s.waits[&until] = true
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.waits, &until)
		s.last = time.Now()
	}
}

// late is how long the sign of life is overdue.
func (p *publisher) late() time.Duration {
	p.pulse.mu.Lock()
	defer p.pulse.mu.Unlock()
	due := p.pulse.last
	for until := range p.pulse.waits {
		if until.After(due) {
			due = *until
		}
	}
	return time.Since(due)
}

// hungAfter is how long a sign of life may be overdue before the lease is no longer renewed. A worker may
// wait for a sink for a Lease before that, so another replica has the shard within three.
func (c *Config) hungAfter() time.Duration { return max(c.Lease/2, 5*time.Second) }

// inspectWorkers notes which shards wait for the brokers, and which hang. It returns the leases
// that may be renewed.
func (m *member) inspectWorkers(ctx context.Context) (leases []*lease) {
	m.unacknowledged = false
	hung := int64(0)
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
		if p.flight.unacknowledged() > m.cfg.answerMax() {
			m.unacknowledged = true
		} else if p.worked.Load() {
			delete(m.troubles, shard)
		}
	}
	m.hung.Store(hung)
	m.sayAway(ctx)
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
