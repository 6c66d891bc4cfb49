package relay

import (
	"context"
	"fmt"
	"time"
)

// progressed is a sign of life of the worker of a shard: each turn of its loop, and of its waits for
// the brokers, and each statement. Nothing else that it waits for takes longer than a statement may.
func (p *publisher) progressed() {
	now := time.Now()
	p.sign.Store(&now)
	p.heartbeat()
}

// late is how long ago the last sign of life was.
func (p *publisher) late() time.Duration { return time.Since(*p.sign.Load()) }

// hungAfter is how old the last sign of life may be before the lease is no longer renewed.
func (p *publisher) hungAfter() time.Duration { return p.patience + p.cfg.Lease/2 }

// inspectWorkers notes which shards wait for the brokers, and which hang. It returns the leases
// that may be renewed.
func (m *member) inspectWorkers(ctx context.Context) (leases []*lease) {
	hung := 0
	m.unacknowledged = false
	for shard, w := range m.workers {
		p := w.publisher
		switch late := p.late(); {
		case late > p.hungAfter():
			hung++
			m.hangs(ctx, w, late)
			continue
		case w.hung:
			m.cfg.Logger.InfoContext(ctx, "a shard makes progress again", "relay", m.cfg.Name, "shard", shard)
			m.setHung(w, false)
		}
		leases = append(leases, w.lease)
		if p.flight.unacknowledged() > m.cfg.unacknowledgedMax() {
			m.unacknowledged = true
		} else if p.worked.Load() {
			delete(m.troubles, shard)
		}
	}
	m.stuck = hung
	m.hung.Store(int64(hung))
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
