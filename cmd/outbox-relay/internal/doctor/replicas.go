package doctor

import (
	"context"
	"fmt"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/relays"
)

func (s *Status) readReplicas(ctx context.Context, db operator.Querier, schema, relay string) error {
	all, err := relays.Replicas(ctx, db, schema)
	if err != nil {
		return err
	}
	for _, r := range all {
		if relay == "" || r.Relay == relay {
			s.Replicas = append(s.Replicas, r)
		}
	}
	return nil
}

// replicas returns the live replicas of a relay.
func (s *Status) replicas(relay string) (all []relays.Replica) {
	for _, r := range s.Replicas {
		if r.Relay == relay {
			all = append(all, r)
		}
	}
	return all
}

// owner returns the replica that holds a shard, or the zero value if nothing is known of it.
func (s *Status) owner(of RelayStatus) *relays.Replica {
	for i, r := range s.Replicas {
		if r.Relay == of.Relay && r.Owner == of.Owner {
			return &s.Replicas[i]
		}
	}
	return &relays.Replica{}
}

// unheld explains why no replica holds a shard.
func (s *Status) unheld(of RelayStatus) string {
	alive := s.replicas(of.Relay)
	if len(alive) == 0 {
		return "rows wait and no replica runs: start \"outbox-relay run\""
	}
	for _, r := range alive {
		if r.Stuck() {
			return fmt.Sprintf("rows wait and no replica holds its lease: %q is stuck: restart it", r.Owner)
		}
	}
	for _, r := range alive {
		if r.Away() {
			return waitsFor(&r)
		}
	}
	return fmt.Sprintf("rows wait and no replica holds its lease, though %d run: see the log of %q", len(alive), alive[0].Owner)
}

// waitsFor says why the rows of a replica wait.
func waitsFor(r *relays.Replica) string {
	return fmt.Sprintf("rows wait, since Kafka or the receiver takes none from %q (%s): make it reachable, then the relay publishes automatically", r.Owner, r.Problem)
}

// judgeReplicas reports replicas that cannot publish. A replica that waits while no rows do is a
// note: nothing is late.
func (s *Status) judgeReplicas() {
	for _, r := range s.Replicas {
		switch {
		case r.Stuck():
			s.Problems = append(s.Problems, fmt.Sprintf("relay %q: replica %q is stuck: restart it (%s)", r.Relay, r.Owner, r.Problem))
		case r.Away():
			s.Notes = append(s.Notes, fmt.Sprintf("relay %q: Kafka or the receiver takes no rows from replica %q (%s)", r.Relay, r.Owner, r.Problem))
		}
	}
}
