package relay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/effectonce/effectonce/internal/pause"
)

// The brokers, or the receiver of a Sink, may take no rows while the database answers. The worker of
// a shard then ends as after any error: it stores what is acknowledged and releases its lease. The
// replica reports that it is away, and takes its shards again after a pause of at most 5 s. With Kafka
// it takes no shard while there are replicas that are not away, and when it has none it takes one
// again only after the brokers answered. The receiver of a Sink cannot be asked.

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
// counts; one that another replica fenced does not.
func away(err error) bool {
	var marked *outletError
	fenced := errors.Is(err, kerr.ProducerFenced) || errors.Is(err, kerr.InvalidProducerEpoch)
	return errors.As(err, &marked) && !fenced && !errors.Is(err, errLeaseLost)
}

// errUnacknowledged is why a shard waits while the client keeps trying.
var errUnacknowledged = errors.New("rows are with the brokers and not acknowledged")

// errSilentBrokers is the cause when a request to the brokers times out.
var errSilentBrokers = errors.New("the brokers did not answer in time")

// asking is the context of a request to the brokers. The client repeats the request until the
// context ends.
func (p *publisher) asking(ctx context.Context) (context.Context, context.CancelFunc) {
	answered := p.flight.awaits()
	ctx, cancel := p.limited(ctx, p.cfg.patience(), errSilentBrokers)
	return ctx, func() { cancel(); answered() }
}

// listen ends the work if the brokers acknowledge nothing for long and no longer answer other
// requests. Brokers that are only slow are waited for: to start over would hand them the same rows.
func (p *publisher) listen(ctx context.Context) error {
	for p.cfg.Sink == nil && pause.For(ctx, p.cfg.answerMax()) {
		if p.flight.unacknowledged() <= p.cfg.answerMax() {
			continue
		}
		if err := p.reach(ctx, true); err != nil && ctx.Err() == nil {
			return fromOutlet(err)
		}
	}
	return nil
}

// answerMax bounds reach, and how long rows may be unacknowledged, or a request unanswered, before the
// replica reports that it waits for the brokers.
func (c *Config) answerMax() time.Duration {
	return min(max(c.Lease/2, 2*time.Second), 10*time.Second)
}

// reach asks a broker for an answer that needs no rights. With all it asks each broker of the cluster: a
// replica that reaches some may not reach the leaders of its partitions.
func (r *Relay) reach(ctx context.Context, all bool) error {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.answerMax())
	defer cancel()
	client, err := r.newClient(nil)
	if err != nil {
		return err
	}
	defer client.Close()
	if err := client.Ping(ctx); err != nil { // otherwise the client would repeat the request for longer than that
		return fmt.Errorf("no broker answers: %w", err)
	}
	if !all {
		return nil
	}
	versions, err := kadm.NewClient(client).ApiVersions(ctx)
	if err != nil {
		return fmt.Errorf("request the API versions of the brokers: %w", err)
	}
	for _, v := range versions.Sorted() {
		if v.Err != nil {
			return fmt.Errorf("broker %d does not answer: %w", v.NodeID, v.Err)
		}
	}
	return nil
}

// comesBack asks, in a replica that is away and has no shard, whether the brokers answer again.
func (m *member) comesBack(ctx context.Context) {
	if !m.isAway() || len(m.workers) > 0 {
		return
	}
	for _, t := range m.troubles {
		if time.Now().Before(t.notYet) {
			return
		}
	}
	err := m.reach(ctx, m.replaced)
	for _, t := range m.troubles {
		if t.silent = err != nil; t.silent {
			t.away = err
			t.again()
		}
	}
}

// isAway reports whether the brokers may not answer this replica.
func (m *member) isAway() bool {
	for _, t := range m.troubles {
		if t.away != nil && t.silent {
			return true
		}
	}
	return false
}

// problem returns why rows cannot leave now, or nil.
func (m *member) problem() error {
	for shard := range int16(shardsMax) {
		if t := m.troubles[shard]; t != nil && t.away != nil {
			return t.away
		}
	}
	if m.unacknowledged {
		return errUnacknowledged
	}
	return nil
}

// sayAway logs that the brokers are unavailable, once and then repeatedly, and that they are back.
func (m *member) sayAway(ctx context.Context) {
	problem, name := m.problem(), "Kafka"
	if m.cfg.Sink != nil {
		name = "the sink"
	}
	text := "waiting for " + name + ": rows wait in the outbox, nothing is lost"
	switch {
	case problem != nil:
		m.say.warn(ctx, text, "relay", m.cfg.Name, "error", problem)
	case m.saidAway:
		m.say.over(ctx, text, name+" takes rows again", "relay", m.cfg.Name)
	}
	if (problem != nil) != m.saidAway && m.cfg.Hooks.Away != nil {
		m.cfg.Hooks.Away(problem)
	}
	m.saidAway = problem != nil
}

// The states of a replica in outbox_replicas.
const (
	statePublishing = "publishing"
	stateStandingBy = "standing_by"
	stateKafkaAway  = "kafka_away"
	stateStuck      = "stuck"
)

// report is the status that a replica stores with each beat.
type report struct {
	obeyed []string // pauses
	state  string
	why    error // rows wait
}

// publishing is the report of a replica that publishes under some leases.
func (r *Relay) publishing(leases ...*lease) report {
	return report{obeyed: r.obeyed(leases), state: statePublishing}
}

// report covers all workers: a worker that hangs may still publish, so it counts when the replica
// confirms pauses. A replica is away only if another one may be better off: not because of brokers
// that are slow, or of a sink.
func (m *member) report() report {
	var leases []*lease
	for _, w := range m.workers {
		leases = append(leases, w.lease)
	}
	how := m.publishing(leases...)
	how.why = m.problem()
	switch hung := m.hung.Load(); {
	case hung > 0:
		how.why = fmt.Errorf("%d shards make no progress: see the log of the replica, and restart it", hung)
		how.state = stateStuck
	case m.isAway():
		how.state = stateKafkaAway
	case len(m.workers) == 0:
		how.state = stateStandingBy
	}
	return how
}

// sharing returns the replicas, possibly including this one, that share the shards: those that are
// neither away nor stuck; if there are none, those that are not stuck; or else all.
func (s *standing) sharing(self, state string) (owners []string) {
	replicas := map[string]string{self: state}
	maps.Copy(replicas, s.states)
	for _, unfit := range [][]string{{stateStuck, stateKafkaAway}, {stateStuck}, nil} {
		for owner, state := range replicas {
			if !slices.Contains(unfit, state) {
				owners = append(owners, owner)
			}
		}
		if len(owners) > 0 {
			break
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
