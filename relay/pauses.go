package relay

import (
	"context"
	"slices"
	"sync/atomic"
	"time"
)

// pausedSet is which topics were paused at one look of the relay. It does not change; a look that finds other pauses
// makes another one.
type pausedSet struct {
	topics []string
	ids    []string // of the pauses, in order; see outbox_paused
	found  time.Time
}

func (s *pausedSet) has(topic string) bool { return s != nil && slices.Contains(s.topics, topic) }

// pausesFound takes note of the pauses that a look found. Workers that sleep follow at once.
func (r *Relay) pausesFound(topics, ids []string) {
	if known := r.paused.Load(); known != nil && slices.Equal(known.ids, ids) {
		return
	}
	r.paused.Store(&pausedSet{topics: topics, ids: ids, found: time.Now()})
	r.wake.call()
}

// obedience is what a worker says about pauses: the set under which everything was sorted that it has in flight. Only
// the worker's own goroutine, the one that sorts pages, stores it.
type obedience struct{ set atomic.Pointer[pausedSet] }

// followPauses takes over the pauses that the relay knows of, once nothing is in flight, nor in a transaction, that was sorted
// under the earlier ones. It comes before anything is sorted, and costs two loads while nothing changed.
func (p *publisher) followPauses(work, ctx context.Context) error {
	now := p.paused.Load()
	if p.lease.obeys.set.Load() == now {
		return nil
	}
	if err := p.target.finish(work, ctx); err != nil {
		return err
	}
	p.lease.obeys.set.Store(now)
	return nil
}

// obeyed returns the pauses that every worker obeys: those of leases, which are all that this replica has.
func (r *Relay) obeyed(leases []*lease) []string {
	ids := []string{}
	known := r.paused.Load()
	if known == nil {
		return ids
	}
	for _, id := range known.ids {
		if !slices.ContainsFunc(leases, func(l *lease) bool {
			set := l.obeys.set.Load()
			return set == nil || !slices.Contains(set.ids, id)
		}) {
			ids = append(ids, id)
		}
	}
	return ids
}

// pausing is true while what the workers obey is not stored, or they are about to follow: an operator waits for it, so the next
// look comes soon. A worker that waits for Kafka follows when it can, and is found by a usual look.
func (m *member) pausing() bool {
	known := m.paused.Load()
	if known == nil {
		return false
	}
	var leases []*lease
	soon := false
	for _, w := range m.workers {
		leases = append(leases, w.lease)
		soon = soon || w.lease.obeys.set.Load() != known && time.Since(known.found) < followMax
	}
	return soon || !slices.Equal(m.obeyed(leases), m.confirmed)
}

// followMax is how long a member looks often for workers that are about to follow.
const followMax = 5 * time.Second
