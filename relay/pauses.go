package relay

import (
	"context"
	"slices"
	"sync/atomic"
	"time"
)

// pausedSet is the topics that were paused at one poll of the relay. It is immutable; a poll that
// finds other pauses makes a new one.
type pausedSet struct {
	topics []string
	ids    []string // of the pauses, in order; see outbox_paused
	found  time.Time
}

func (s *pausedSet) has(topic string) bool { return s != nil && slices.Contains(s.topics, topic) }

// pausesFound stores the pauses that a poll found. Sleeping workers follow at once.
func (r *Relay) pausesFound(topics, ids []string) {
	if known := r.paused.Load(); known != nil && slices.Equal(known.ids, ids) {
		return
	}
	r.paused.Store(&pausedSet{topics: topics, ids: ids, found: time.Now()})
	r.wake.call()
}

// obedience is the pauses that a worker obeys: everything that it has in flight was sorted under
// this set. Only the worker's own goroutine, the one that sorts pages, stores it.
type obedience struct{ set atomic.Pointer[pausedSet] }

// followPauses adopts the pauses that the relay knows, once nothing that was sorted under the
// earlier ones is in flight or in a transaction. It runs before anything is sorted, and costs two
// loads while nothing changed.
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

// obeyed returns the pauses that every worker obeys. leases are all leases of this replica.
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

// pausing is true while an operator waits for pauses to be stored as obeyed, so the next step comes
// soon. A worker that waits longer for Kafka follows when it can; a regular step finds it.
func (m *member) pausing() bool {
	known := m.paused.Load()
	return known != nil && time.Since(known.found) < followMax && !slices.Equal(known.ids, m.confirmed)
}

// followMax is how long a member polls often for workers that are about to follow.
const followMax = 5 * time.Second
