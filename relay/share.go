package relay

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// replica is another process of the relay, as it last reported itself.
type replica struct {
	owner      string
	reachedAgo *time.Duration // since the brokers answered it; nil: never
	stuck      bool
}

func replicas(owners []string, reached []*float64, states []string) (all []replica) {
	for i, owner := range owners {
		r := replica{owner: owner, stuck: states[i] == stateStuck}
		if ago := reached[i]; ago != nil {
			d := time.Duration(*ago * float64(time.Second))
			r.reachedAgo = &d
		}
		all = append(all, r)
	}
	return all
}

// yieldsAfter is how much later than this replica another one must have reached the brokers before
// it counts as better off. Replicas that lose the brokers at the same time notice it within a beat
// and a probe of each other, which is less: then no replica yields.
func (c *Config) yieldsAfter() time.Duration { return max(c.Lease, 5*time.Second) }

// sharing returns the replicas, possibly including this one, that share the shards: those without a
// hung shard if there are any, and of them those that reached the brokers last.
func (s *standing) sharing(self replica, margin time.Duration) []string {
	all := append(slices.Clone(s.others), self)
	if well := slices.DeleteFunc(slices.Clone(all), func(r replica) bool { return r.stuck }); len(well) > 0 {
		all = well
	}
	var latest *time.Duration
	for _, r := range all {
		if r.reachedAgo != nil && (latest == nil || *r.reachedAgo < *latest) {
			latest = r.reachedAgo
		}
	}
	var owners []string
	for _, r := range all {
		if latest == nil || r.reachedAgo != nil && *r.reachedAgo <= *latest+margin {
			owners = append(owners, r.owner)
		}
	}
	slices.Sort(owners)
	return owners
}

// quota is the number of shards of a replica: the same for all replicas that share them, and one
// more for the first ones by name if the shards do not divide evenly.
func (s *standing) quota(owner string, sharing []string) int {
	place := slices.Index(sharing, owner)
	if place < 0 {
		return 0
	}
	each, left := int(s.shards)/len(sharing), int(s.shards)%len(sharing)
	if place < left {
		each++
	}
	return each
}

// errYields ends the work on a shard that another replica can publish and this one cannot.
var errYields = fmt.Errorf("another replica reaches brokers or a receiver that this one does not reach")

// yield gives up all shards to replicas that are better off. It does not wait for rows that are
// with unresponsive brokers: they are published again.
func (m *member) yield(ctx context.Context, to []string) {
	if len(m.workers) == 0 {
		return
	}
	m.say.warn(ctx, "the shards go to replicas that are better off", "relay", m.cfg.Name, "owner", m.cfg.Owner, "to", to, "error", m.outlet.problem(), "hung", m.stuck)
	for _, w := range m.workers {
		if m.stuck > 0 {
			w.end() // cleanly: it reaches the brokers
		} else {
			w.publisher.lose(errYields)
		}
	}
}

// standBy logs once which replicas publish instead of this one.
func (m *member) standBy(ctx context.Context, s *standing) {
	by := ""
	if len(m.workers) == 0 && len(s.free) == 0 {
		holders := slices.Clone(s.holders)
		slices.Sort(holders)
		by = fmt.Sprint(slices.Compact(holders))
	}
	if by != m.behind && by != "" {
		m.cfg.Logger.InfoContext(ctx, "standing by: other replicas publish, this one takes over if they cannot", "relay", m.cfg.Name, "owner", m.cfg.Owner, "published_by", by)
	}
	m.behind = by
}
