package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/internal/pause"
)

// The outlet is where rows go: the brokers, or a Sink. It may be unavailable while the database
// answers. That is a state, not a failure: the replica keeps its leases, reports what it waits for,
// and tries again from stored progress under the same epochs. It yields its shards only to a
// replica that reaches an outlet which this one no longer reaches: see standing.sharing.

// Checker is a Sink that can report whether its receiver answers. A replica whose receiver does not
// answer yields its shards to a replica whose receiver does. Without Check the replica keeps its
// shards and retries until the receiver answers.
type Checker interface {
	Sink
	// Check makes a cheap request to the receiver, and returns an error if no answer came. ctx ends
	// after a quarter of a Lease. Check is called from one goroutine, at the same time as Publish.
	Check(ctx context.Context) error
}

// outlet is the state of the brokers, or of the sink, as this replica knows it.
type outlet struct {
	reached atomic.Pointer[time.Time] // time of the last answer; nil: never

	mu     sync.Mutex
	probe  error           // error of the last probe; nil: it answered
	shards map[int16]error // shards that wait for the outlet, and why
	away   bool            // the hook has reported it as away
}

// outletError marks errors of the brokers or of a sink, including timeouts. Without the mark they
// look the same as errors of database connections.
type outletError struct{ error }

func (e *outletError) Unwrap() error { return e.error }

// fromOutlet marks an error of the brokers or of a sink. nil stays nil.
func fromOutlet(err error) error {
	if err == nil {
		return nil
	}
	return &outletError{err}
}

// away reports whether an error means that the brokers, or the sink, do not take rows now: no
// connection, no answer in time, no leader, too few replicas, or a refusal that an operator can
// lift, such as missing rights. A transaction that the brokers ended because it took too long also
// counts. So does a transaction that another replica fenced: the database knows whether this
// replica still holds its lease, and is queried before the work begins again.
func away(err error) bool {
	var marked *outletError
	return errors.As(err, &marked) && !errors.Is(err, errLimitsChanged) && !errors.Is(err, errLeaseLost)
}

// errUnacknowledged is why a shard waits while the client keeps trying.
var errUnacknowledged = errors.New("rows are with the brokers and not acknowledged")

// errSilentBrokers is the cause when a request to the brokers times out.
var errSilentBrokers = errors.New("the brokers did not answer in time")

// asking is the context of a request to the brokers. The client repeats the request until the
// context ends.
func (p *publisher) asking(ctx context.Context) (context.Context, context.CancelFunc) {
	limit := p.cfg.patience()
	return p.limited(ctx, limit, errSilentBrokers)
}

// answered is called for each acknowledgement. It takes no lock.
func (o *outlet) answered() {
	now := time.Now()
	o.reached.Store(&now)
}

// reachedAgo is the time since the brokers last answered; nil: never. The receiver of a sink
// without Check counts as reached: no other replica could know better.
func (r *Relay) reachedAgo() *time.Duration {
	var ago time.Duration
	if r.probes() {
		at := r.outlet.reached.Load()
		if at == nil {
			return nil
		}
		ago = time.Since(*at)
	}
	return &ago
}

func (r *Relay) probes() bool {
	_, can := r.cfg.Sink.(Checker)
	return r.cfg.Sink == nil || can
}

// outletName returns a name for log messages, and a state for outbox_replicas.
func (r *Relay) outletName() (name, state string) {
	if r.cfg.Sink != nil {
		return "the sink", stateSinkAway
	}
	return "Kafka", stateKafkaAway
}

// The states of a replica in outbox_replicas.
const (
	statePublishing = "publishing"
	stateStandingBy = "standing_by"
	stateKafkaAway  = "kafka_away"
	stateSinkAway   = "sink_away"
	stateStuck      = "stuck"
)

// waits notes why a shard waits for the brokers; nil: it does not wait.
func (r *Relay) waits(ctx context.Context, shard int16, why error) {
	r.outlet.note(func(o *outlet) {
		if why == nil {
			delete(o.shards, shard)
			return
		}
		if o.shards == nil {
			o.shards = map[int16]error{}
		}
		o.shards[shard] = why
	})
	r.sayAway(ctx)
}

// probed notes whether the brokers answered.
func (r *Relay) probed(ctx context.Context, err error) {
	if err == nil {
		r.outlet.answered()
	}
	r.outlet.note(func(o *outlet) { o.probe = err })
	r.sayAway(ctx)
}

func (o *outlet) note(change func(*outlet)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	change(o)
}

// problem returns why rows cannot leave now, or nil. An error of a shard takes precedence: the
// shard has tried.
func (o *outlet) problem() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.problemLocked()
}

func (o *outlet) problemLocked() error {
	var first error
	lowest := int16(-1)
	for shard, err := range o.shards {
		if lowest < 0 || shard < lowest {
			lowest, first = shard, err
		}
	}
	if first == nil || errors.Is(first, errUnacknowledged) && o.probe != nil {
		return o.probe
	}
	return first
}

// sayAway logs that the brokers are unavailable, once and then repeatedly, and that they are back.
func (r *Relay) sayAway(ctx context.Context) {
	o := &r.outlet
	o.mu.Lock()
	defer o.mu.Unlock()
	problem := o.problemLocked()
	name, _ := r.outletName()
	text := "waiting for " + name + ": rows wait in the outbox, leases are kept, nothing is lost"
	switch {
	case problem != nil:
		r.say.warn(ctx, text, "relay", r.cfg.Name, "error", problem)
	case o.away:
		r.say.over(ctx, text, name+" takes rows again", "relay", r.cfg.Name)
	}
	if (problem != nil) != o.away && r.cfg.Hooks.Away != nil {
		r.cfg.Hooks.Away(problem)
	}
	o.away = problem != nil
}

// probe checks repeatedly whether the brokers answer, as long as no published row shows that they
// do, until ctx ends.
func (m *member) probe(ctx context.Context) {
	look, end, err := m.newProbe()
	if err != nil { // New has tried the same options
		m.cfg.Logger.ErrorContext(ctx, "the brokers cannot be probed", "relay", m.cfg.Name, "error", err)
		return
	}
	defer end()
	for ok := true; ok; ok = pause.For(ctx, m.probeEvery()) {
		if ago := m.reachedAgo(); ago != nil && *ago < m.probeEvery() {
			m.outlet.note(func(o *outlet) { o.probe = nil })
			m.sayAway(ctx)
			continue
		}
		asking, cancel := context.WithTimeout(ctx, m.probeEvery())
		err := look(asking)
		cancel()
		if ctx.Err() == nil {
			m.probed(ctx, err)
		}
	}
}

// probeEvery is far below the margin that distinguishes two replicas: see yieldsAfter.
func (m *member) probeEvery() time.Duration {
	return min(max(m.cfg.Lease/4, 500*time.Millisecond), 10*time.Second)
}

// newProbe sends each broker of the cluster a request that needs no rights: a replica that reaches
// some brokers may not reach the leaders of its partitions.
func (m *member) newProbe() (look func(context.Context) error, end func(), err error) {
	if checker, ok := m.cfg.Sink.(Checker); ok {
		return checker.Check, func() {}, nil
	}
	client, err := m.newClient(nil, nil)
	if err != nil {
		return nil, nil, err
	}
	admin := kadm.NewClient(client)
	return func(ctx context.Context) error {
		if err := client.Ping(ctx); err != nil { // otherwise the client would repeat the request for longer than that
			return fmt.Errorf("no broker answers: %w", err)
		}
		versions, err := admin.ApiVersions(ctx)
		if err != nil {
			return fmt.Errorf("request the API versions of the brokers: %w", err)
		}
		for _, v := range versions.Sorted() {
			if v.Err != nil {
				return fmt.Errorf("broker %d does not answer: %w", v.NodeID, v.Err)
			}
		}
		return nil
	}, client.Close, nil
}

// report is the status that a replica stores with each beat.
type report struct {
	obeyed  []string // pauses
	state   string
	problem *string
}

// publishing is the report of a replica that publishes under some leases.
func (r *Relay) publishing(leases ...*lease) report {
	return report{obeyed: r.obeyed(leases), state: statePublishing}
}

// report covers all workers: a worker that hangs may still publish, so it counts when the replica
// confirms pauses.
func (m *member) report() report {
	var leases []*lease
	for _, w := range m.workers {
		leases = append(leases, w.lease)
	}
	how := m.publishing(leases...)
	why := m.outlet.problem()
	switch {
	case m.stuck > 0:
		why = fmt.Errorf("%d shards make no progress: see the log of the replica, and restart it", m.stuck)
		how.state = stateStuck
	case why != nil:
		_, how.state = m.outletName()
	case len(m.workers) == 0:
		how.state = stateStandingBy
	}
	if why != nil {
		text := bounds.ErrorText(why)
		how.problem = &text
	}
	return how
}

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
