package relay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/internal/pause"
)

// member is this replica among the replicas that share a relay's shards. One goroutine polls the
// state in the database, takes and releases shards, and renews their leases. Each held shard has a
// worker.
type member struct {
	*Relay
	workers  map[int16]*worker
	troubles map[int16]*trouble // of shards, until the work on them succeeds
	tidied   time.Time          // when old ticks were last removed, and slots checked

	replaced       bool // other replicas share all shards
	unacknowledged bool // a worker waits for acknowledgements
	saidAway       bool // to the hook
}

// worker publishes one shard.
type worker struct {
	lease     *lease
	first     int64 // number in the chain at the start
	publisher *publisher
	stop      context.CancelFunc
	ending    bool
	hung      bool
	gone      bool  // the hook has reported the lease as lost, although the work has not ended
	err       error // valid once the worker has been sent to ended
}

// trouble is about a shard whose work ended with an error.
type trouble struct {
	times  int       // in a row
	notYet time.Time // the shard is not taken before this time
	away   error     // why the brokers, or the sink, took no rows; nil: it was another error
	silent bool      // they may not answer this replica at all: see comesBack
}

// again begins the pause before the next attempt.
func (t *trouble) again() time.Duration {
	t.times++
	wait := backoff(t.times)
	t.notYet = time.Now().Add(wait)
	return wait
}

// end stops the work cleanly. It does not wait.
func (w *worker) end() {
	w.ending = true
	w.stop()
}

// standing is the state of the relay in the database, on the database's clock.
type standing struct {
	shards  int16
	states  map[string]string // of the other live replicas, by owner
	free    []int16
	renewed []int16
}

// participate takes part until ctx ends.
func (m *member) participate(ctx context.Context) error {
	ended := make(chan *worker)
	var group sync.WaitGroup
	defer func() {
		for _, w := range m.workers {
			w.end()
		}
		go func() { group.Wait(); close(ended) }()
		for w := range ended {
			_ = m.reap(ctx, w)
		}
		m.describe("stopped", nil, nil)
		m.leave(ctx, true)
	}()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case w := <-ended:
			if err := m.reap(ctx, w); err != nil {
				return err
			}
			timer.Reset(0) // others read the state of this replica, and may take the shard
		case <-timer.C:
			begun := time.Now()
			if err := m.step(ctx, &group, ended); err != nil {
				return err
			}
			// The interval is from start to start: the duration of a step must not add to the pause
			// between two renewals.
			timer.Reset(max(time.Millisecond, m.beatEvery()-time.Since(begun)))
		}
	}
	return nil
}

// beatEvery is how often a member beats. A member without work takes over a shard soon. A member
// with work renews its leases, and no other replica has a reason to check.
func (m *member) beatEvery() time.Duration {
	every := min(max(m.cfg.Lease/4, 100*time.Millisecond), 2500*time.Millisecond)
	if len(m.workers) == 0 {
		every = min(max(m.cfg.Lease/20, 50*time.Millisecond), 250*time.Millisecond)
	}
	for _, t := range m.troubles {
		if wait := time.Until(t.notYet); wait > 0 {
			every = min(every, max(wait, 50*time.Millisecond))
		}
	}
	return every
}

// step reads the state in the database once and acts on it.
func (m *member) step(ctx context.Context, group *sync.WaitGroup, ended chan<- *worker) error {
	m.heartbeat()
	m.comesBack(ctx)
	leases, how := m.inspectWorkers(ctx), m.report()
	s, err := m.beat(ctx, leases, how)
	shards := slices.Sorted(maps.Keys(m.workers))
	if err != nil {
		m.describe("database_away", err, shards)
		if ctx.Err() == nil {
			m.say.warn(ctx, silentDatabase, "relay", m.cfg.Name, "error", err)
		}
		return nil
	}
	m.describe(how.state, how.why, shards)
	m.say.over(ctx, silentDatabase, "the database answers again", "relay", m.cfg.Name)
	for shard, w := range m.workers {
		if !slices.Contains(s.renewed, shard) && slices.Contains(leases, w.lease) {
			w.publisher.flight.makeVoid(errLeaseLost)
		}
		if w.hung && !w.gone && !w.lease.held() { // the worker cannot report it
			w.gone = true
			m.tell(shard, false)
		}
	}
	if s.shards == 0 {
		if err := m.enroll(ctx); err != nil && !unreachable(err) { // the relay was deleted
			return err
		}
		return nil
	}
	if len(m.workers) == 0 && len(s.free) == 0 && !m.isAway() {
		clear(m.troubles) // others publish
	}
	sharing := s.sharing(m.cfg.Owner, how.state)
	m.replaced = !slices.Contains(sharing, m.cfg.Owner)
	quota := s.quota(m.cfg.Owner, sharing)
	m.shed(quota)
	if err := m.acquireShards(ctx, s.free, quota, group, ended); err != nil {
		return err
	}
	// Limited, because the leases must be renewed.
	upkeep, cancel := context.WithTimeout(ctx, m.cfg.Lease/2)
	defer cancel()
	m.tidy(upkeep)
	return nil
}

const silentDatabase = "the database does not answer: leases could not be renewed"

// beat renews leases and returns the state of the relay.
func (r *Relay) beat(ctx context.Context, leases []*lease, how report) (*standing, error) {
	shards, epochs, runs := make([]int16, len(leases)), make([]int64, len(leases)), make([]string, len(leases))
	for i, l := range leases {
		shards[i], epochs[i], runs[i] = l.shard, l.epoch, l.cluster.run
	}
	ctx, cancel := r.answered(ctx, r.cfg.Lease)
	defer cancel()
	var problem *string
	if how.why != nil {
		text := bounds.ErrorText(how.why)
		problem = &text
	}
	asked := time.Now()
	s := &standing{}
	rows, err := r.pool.Query(ctx, r.sql.of(beatSQL), r.cfg.Name, r.cfg.Owner, r.cfg.Lease, shards, epochs, runs, how.obeyed, how.state, problem)
	if err != nil {
		return nil, fmt.Errorf("renew leases: %w", err)
	}
	var shard int16
	var free, renewed bool
	var paused, pauses []string
	_, err = pgx.ForEachRow(rows, []any{&s.shards, &s.states, &shard, &free, &renewed, &paused, &pauses}, func() error {
		if free {
			s.free = append(s.free, shard)
		}
		if renewed {
			s.renewed = append(s.renewed, shard)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("renew leases: %w", err)
	}
	r.pausesFound(paused, pauses)
	for _, l := range leases {
		if slices.Contains(s.renewed, l.shard) {
			l.trust(asked, r.cfg.Lease)
		}
	}
	return s, nil
}

// answered is the context of a statement that takes or renews leases: a stop waits a moment for its
// answer. The server could execute an interrupted one after the leases are released.
func (r *Relay) answered(ctx context.Context, most time.Duration) (context.Context, context.CancelFunc) {
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), most)
	lasting, stop := pause.Outlast(limited, ctx, time.Second)
	return lasting, func() { stop(); cancel() }
}

// shed releases shards above the quota cleanly: it waits for rows in flight.
func (m *member) shed(quota int) {
	var held []int16
	for shard, w := range m.workers {
		if !w.ending {
			held = append(held, shard)
		}
	}
	slices.Sort(held)
	for _, shard := range held[min(quota, len(held)):] {
		m.workers[shard].end()
	}
}

// acquireShards takes free shards up to the quota.
func (m *member) acquireShards(ctx context.Context, free []int16, quota int, group *sync.WaitGroup, ended chan<- *worker) error {
	if m.isAway() && len(m.workers) == 0 {
		return nil // see comesBack
	}
	for _, shard := range free {
		if len(m.workers) >= quota || ctx.Err() != nil {
			return nil //nolint:nilerr // a clean stop
		}
		if t := m.troubles[shard]; m.workers[shard] != nil || t != nil && time.Now().Before(t.notYet) {
			continue // the worker is ending, or it is too soon
		}
		l, err := m.acquire(ctx, shard)
		if errors.Is(err, ErrOldPrimary) {
			return err
		}
		if err != nil {
			m.back(ctx, shard, err)
			return nil
		}
		if l != nil {
			m.cfg.Logger.InfoContext(ctx, "relay took the lease", "relay", m.cfg.Name, "owner", m.cfg.Owner, "shard", l.shard, "shards", l.shards, "epoch", l.epoch)
			m.start(ctx, l, group, ended)
		}
	}
	return nil
}

func (m *member) start(ctx context.Context, l *lease, group *sync.WaitGroup, ended chan<- *worker) {
	working, stop := context.WithCancel(ctx)
	w := &worker{lease: l, first: l.n, publisher: newPublisher(m.Relay, l), stop: stop}
	if t := m.troubles[l.shard]; t != nil {
		w.publisher.patience <<= min(t.times, patienceGrows)
	}
	m.workers[l.shard] = w
	if most, need := int(m.pool.Config().MaxConns), 2+2*len(m.workers); most < need {
		m.say.warn(ctx, "the pool has fewer connections than the relay needs: statements wait for each other, and leases may be lost: raise pool_max_conns",
			"relay", m.cfg.Name, "connections", most, "needed", need, "shards", len(m.workers))
	}
	m.tell(l.shard, true)
	if l.shard == 0 {
		group.Go(func() { m.promote(working) })
	}
	group.Go(func() {
		defer stop()
		w.err = w.publisher.publish(working)
		ended <- w // after this the member may read err
	})
}

// reap handles a worker that ended. It returns an error that waiting cannot fix.
func (m *member) reap(ctx context.Context, w *worker) error {
	shard := w.lease.shard
	delete(m.workers, shard)
	if !w.gone {
		m.tell(shard, false)
	}
	if w.hung {
		m.setHung(w, false)
	}
	var batch *refused
	worked := w.publisher.worked.Load()
	soon := errors.As(w.err, &batch)
	if soon { // also where other rows are acknowledged each time
		worked = w.lease.n > w.first
	}
	if w.err == nil || worked {
		delete(m.troubles, shard)
	}
	switch {
	case w.err == nil:
	case errors.Is(w.err, ErrOldPrimary), errors.Is(w.err, errTopicPanicked):
		return w.err
	case soon && m.soonAgain(shard):
		m.cfg.Logger.InfoContext(ctx, "relay starts over", "relay", m.cfg.Name, "shard", shard, "why", w.err)
	default:
		m.back(ctx, shard, fmt.Errorf("shard %d: %w", shard, w.err))
	}
	return nil
}

// soonMax is how often in a row the work may begin anew at once without progress.
const soonMax = 10

// soonAgain notes that the work begins anew, and reports whether it may do so at once.
func (m *member) soonAgain(shard int16) bool {
	t := m.trouble(shard)
	t.times++
	return t.times < soonMax
}

// tell reports a lease change to the hook.
func (m *member) tell(shard int16, held bool) {
	if m.cfg.Hooks.Lease != nil {
		m.cfg.Hooks.Lease(shard, held)
	}
}

func (m *member) trouble(shard int16) *trouble {
	if m.troubles[shard] == nil {
		m.troubles[shard] = &trouble{}
	}
	return m.troubles[shard]
}

// back notes an error of the work on a shard, which is taken again after a pause.
func (m *member) back(ctx context.Context, shard int16, err error) {
	if ctx.Err() != nil {
		return
	}
	t := m.trouble(shard)
	wait := t.again()
	if t.away = nil; !away(err) {
		m.interrupted(ctx, err, wait)
		return
	}
	t.away, t.silent = err, m.cfg.Sink == nil
	m.sayAway(ctx)
	if m.cfg.Hooks.Interrupted != nil {
		m.cfg.Hooks.Interrupted(err)
	}
}

// leave removes the replica from the list, so that the others need not wait for it. ended: it publishes
// nothing any more.
func (r *Relay) leave(ctx context.Context, ended bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.cfg.Lease)
	defer cancel()
	if _, err := r.pool.Exec(ctx, r.sql.of(leaveSQL), r.cfg.Name, r.cfg.Owner, ended); err != nil {
		r.say.warn(ctx, "replica could not be removed from the list; it expires by itself", "relay", r.cfg.Name, "error", err)
	}
}

// shardsMax is the number of distinct values of outbox.shard.
const shardsMax = math.MaxUint8 + 1
