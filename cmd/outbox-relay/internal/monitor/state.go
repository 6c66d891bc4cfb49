package monitor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/migrations"
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
		Heartbeat: func() { s.locked(func() { s.turn = time.Now() }) },
		Lease: func(shard int16, held bool) {
			s.locked(func() {
				s.turn = time.Now()
				mark(s.owned, shard, held)
			})
		},
		Away: func(why error) { s.locked(func() { s.away = why != nil }) },
		Hung: func(shard int16, hung bool) { s.locked(func() { mark(s.hung, shard, hung) }) },
	}
}

func (s *State) locked(work func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	work()
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
	s.locked(func() { s.phase, s.turn = max(s.phase, next), time.Now() })
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
	s.locked(func() { owned, hung, away = len(s.owned), len(s.hung), s.away })
	return owned, hung, away
}

// Limits of the query to the database.
const (
	askMax       = 2 * time.Second
	statementMax = "1500ms"
	answerMaxAge = time.Second // so that many probes cost no more than one
)

// Readiness is the response of /readyz.
type Readiness struct {
	Ready  bool   `json:"ready"`
	Relay  string `json:"relay"`
	State  string `json:"state"` // starting, publishing, standing_by, kafka_away, waiting or draining
	Shards int    `json:"shards_owned"`
	// Reasons are the reasons why it is not ready.
	Reasons []string `json:"reasons"`
}

// answer is the result of the query to the database.
type answer struct {
	at     time.Time
	reason string // empty: it is reachable, and the schema is not older than the program
	held   bool   // a replica holds a lease
}

// ask asks the database, one request at a time.
func (s *Server) ask(ctx context.Context) answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pool == nil {
		return answer{reason: "the database is not connected yet"}
	}
	if time.Since(s.last.at) < answerMaxAge {
		return s.last
	}
	// The next caller uses the answer, too: a caller that hangs up must not cancel it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askMax)
	defer cancel()
	held, err := s.look(ctx)
	s.last = answer{at: time.Now(), reason: reason(err), held: held}
	return s.last
}

var errStandby = errors.New("the database is a standby")

func (s *Server) look(ctx context.Context) (held bool, err error) {
	err = pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		var standby bool
		if err := tx.QueryRow(ctx, limitsSQL, statementMax).Scan(nil, nil, &standby); err != nil {
			return err
		}
		if standby {
			return errStandby
		}
		// A newer schema is no reason to be not ready: a roll-out migrates first, and then replaces
		// replicas, which publish until then. If all of them became not ready, they could all be
		// ended at once.
		if err := migrations.Check(ctx, tx, migrations.Options{Schema: s.cfg.Schema}); err != nil && !errors.Is(err, migrations.ErrTooNew) {
			return err
		}
		return tx.QueryRow(ctx, migrations.InSchema(heldSQL, s.cfg.Schema), s.cfg.Relay).Scan(&held)
	})
	return held, err
}

// reason never repeats the driver's text, which contains names of users and hosts.
func reason(err error) string {
	switch {
	case err == nil:
		return ""
	case errors.Is(err, errStandby), errors.Is(err, migrations.ErrTooOld):
		return err.Error()
	}
	return "the database does not answer, or refuses the connection or the query: see the log"
}

// readiness of this replica now.
func (s *Server) readiness(ctx context.Context) Readiness {
	at := s.ask(ctx)
	var phase phase
	s.cfg.State.locked(func() { phase = s.cfg.State.phase })
	shards, _, away := s.cfg.State.Shards()
	r := Readiness{Relay: s.cfg.Relay, Shards: shards, Reasons: []string{}}
	if at.reason != "" {
		r.Reasons = append(r.Reasons, at.reason)
	}
	switch {
	case phase == starting:
		r.State = "starting"
		r.Reasons = append(r.Reasons, "the relay is starting")
	case phase == draining:
		r.State = "draining"
		r.Reasons = append(r.Reasons, "the relay is stopping")
	case away:
		r.State = "kafka_away"
		r.Reasons = append(r.Reasons, "Kafka does not accept rows from this replica: they wait in the outbox; the log shows which broker does not answer")
	case shards > 0:
		r.State = "publishing"
	case at.held:
		r.State = "standing_by"
	default:
		r.State = "waiting"
		if at.reason == "" {
			r.Reasons = append(r.Reasons, "no replica holds a lease")
		}
	}
	r.Ready = len(r.Reasons) == 0
	return r
}

const limitsSQL = `-- monitor.limits
SELECT pg_catalog.set_config('statement_timeout', $1, true), pg_catalog.set_config('lock_timeout', $1, true), pg_is_in_recovery()`

const heldSQL = `-- monitor.held
SELECT EXISTS (SELECT FROM effectonce.outbox_progress WHERE relay = $1 AND lease_until > clock_timestamp())`
