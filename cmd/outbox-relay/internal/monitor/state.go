package monitor

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/relay"
)

// phase is a phase in the life of a replica.
type phase int

const (
	starting phase = iota
	running
	draining
)

// stuckAfter is far above what one turn of a relay that holds a lease may take. Renewals end with
// the lease, and a relay that waits for statements or brokers still makes turns.
const stuckAfter = 5 * time.Minute

// State is the state of a relay, from its callbacks.
type State struct {
	stuckAfter time.Duration

	mu    sync.Mutex
	phase phase
	owned map[int16]bool // shards
	hung  map[int16]bool // shards whose work gives no sign of life
	away  bool           // Kafka accepts no rows from this replica
	turn  time.Time      // the last sign of life
}

// NewState returns the state of a starting replica.
func NewState() *State {
	return &State{stuckAfter: stuckAfter, owned: map[int16]bool{}, hung: map[int16]bool{}, turn: time.Now()}
}

// Hooks returns callbacks that update the state.
func (s *State) Hooks() relay.Hooks {
	return relay.Hooks{
		Heartbeat: func() { s.set(func() { s.turn = time.Now() }) },
		Lease: func(shard int16, held bool) {
			s.set(func() {
				s.turn = time.Now()
				mark(s.owned, shard, held)
			})
		},
		Away: func(why error) { s.set(func() { s.away = why != nil }) },
		Hung: func(shard int16, hung bool) { s.set(func() { mark(s.hung, shard, hung) }) },
	}
}

func (s *State) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

func mark(shards map[int16]bool, shard int16, in bool) {
	if in {
		shards[shard] = true
	} else {
		delete(shards, shard)
	}
}

// Running records that the relay is set up and begins to work.
func (s *State) Running() { s.enter(running) }

// Draining records that the relay was told to stop.
func (s *State) Draining() { s.enter(draining) }

// enter never returns to an earlier phase: a stop may come before the start is complete.
func (s *State) enter(next phase) {
	s.set(func() { s.phase, s.turn = max(s.phase, next), time.Now() })
}

// stuck returns why the process has to be restarted, or an empty text. One hung shard is enough,
// even if the others work: its work does not return, so only the end of the process ends it.
// Otherwise only a replica that holds a shard can be stuck. A replica without shards waits for the
// database or for another replica, and a restart would help neither.
func (s *State) stuck() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	silent := time.Since(s.turn)
	switch {
	case s.phase != running:
		return ""
	case len(s.hung) > 0:
		return fmt.Sprintf("shards %v hang: a client or a sink does not return, see the log", slices.Sorted(maps.Keys(s.hung)))
	case len(s.owned) > 0 && silent > s.stuckAfter:
		return fmt.Sprintf("the relay holds %s and has done nothing for %s", human.Count(len(s.owned), "shard"), human.Duration(silent))
	}
	return ""
}

// Shards returns how many shards the replica has, how many of them hang, and whether Kafka accepts no rows.
func (s *State) Shards() (owned, hung int, away bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.owned), len(s.hung), s.away
}

func (s *State) now() phase {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.phase
}
