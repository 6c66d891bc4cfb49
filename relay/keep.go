package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// pulse is by when the work on a shard gives its next sign of life. Each turn of its loop is one; before it waits for
// something that ends by itself (a statement, the brokers, a call of a sink) the work says for how long.
type pulse struct {
	mu    sync.Mutex
	last  time.Time
	waits map[int]time.Time // what the work waits for now, and until when at most
	n     int
}

// turn is a sign of life.
func (p *publisher) turn() {
	p.pulse.mu.Lock()
	p.pulse.last = time.Now()
	p.pulse.mu.Unlock()
	p.Relay.turn()
}

// expect begins a wait of at most d. Its end, which ended notes, is a sign of life.
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

// late is how long the work owes a sign of life.
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

// hungAfter is how long the work may owe a sign of life before its lease is not renewed any more.
func (c *Config) hungAfter() time.Duration { return max(c.Lease, 5*time.Second) }

// unacknowledgedMax is how long rows may be with the brokers before the replica says that it waits for them.
func (c *Config) unacknowledgedMax() time.Duration {
	return min(max(c.Lease/2, time.Second), 10*time.Second)
}

// keeps tells whether the work ended for something that waiting, or a new client, ends, and that no other replica would
// fare better with: it begins again under the same lease. A change of the number of shards begins with new leases.
func (p *publisher) keeps(ctx context.Context, err error) bool {
	var alone *refusedAlone
	again := away(err) || errors.Is(err, errLimitsChanged) || errors.As(err, &alone)
	return again && !p.once && ctx.Err() == nil && !p.course.isBound() && p.lease.held()
}

// swap puts another publisher into a worker. The member does it: it looks at workers.
type swap struct {
	worker *worker
	next   *publisher
	done   chan struct{}
}

// keep publishes a shard until its lease is to be given back, or is lost. What the brokers or a sink do not take for now
// costs no lease: the work begins again from stored progress, under the same epoch.
func (m *member) keep(ctx context.Context, w *worker, p *publisher) error {
	for n := 1; ; n++ {
		err := p.publish(ctx)
		if !p.kept {
			m.waits(ctx, p.lease.shard, nil)
			return err
		}
		if p.worked.Load() {
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

// again waits and makes the publisher that goes on where progress is stored.
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
	l := p.lease // the member renews it meanwhile, and looks at nothing that resume changes
	if err := m.resume(ctx, l); err != nil {
		return nil, err
	}
	next := newPublisher(m.Relay, l)
	next.patience = p.patience
	// What holds for the rows of earlier looks holds for later ones.
	next.progress.seqSafe.Store(p.progress.seqSafe.Load())
	next.progress.seqRead.Store(p.progress.seqSafe.Load())
	return next, nil
}

// replace hands the next publisher to the member, which looks at it from now on.
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

// swapIn is the member's part of replace.
func (m *member) swapIn(ctx context.Context, s swap) {
	s.worker.publisher = s.next
	if m.cut != nil {
		m.abandonCut(ctx) // the shard may be before the cut or behind it: the new publisher knows of none
	}
	close(s.done)
}

// look notes which shards wait for the brokers, and which hang. It returns those whose leases may be renewed.
func (m *member) look(ctx context.Context) (leases []*lease) {
	hung := 0
	for shard, w := range m.workers {
		p := w.publisher
		switch late := p.late(); {
		case !p.course.isOver() && late > m.cfg.hungAfter():
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

// hangs lets the lease of a shard run out whose work gives no sign of life: another replica takes it over then. It is
// not given back, for the work may still publish.
func (m *member) hangs(ctx context.Context, w *worker, late time.Duration) {
	if !w.hung {
		m.setHung(w, true)
	}
	m.say.about(ctx, slog.LevelError, fmt.Sprint(w.lease.shard), "a shard hangs, in a client or a sink that does not return: its lease is not renewed, another replica takes it over; restart this one",
		"relay", m.cfg.Name, "owner", m.cfg.Owner, "shard", w.lease.shard, "epoch", w.lease.epoch, "since", late.Round(time.Second))
}

func (m *member) setHung(w *worker, hung bool) {
	w.hung = hung
	if m.cfg.Hooks.Hung != nil {
		m.cfg.Hooks.Hung(w.lease.shard, hung)
	}
}
