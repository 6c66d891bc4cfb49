package bench

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// networkRoundTrip is the simulated round trip to PostgreSQL.
const networkRoundTrip = 3 * time.Millisecond

// loadStep is a load. At the larger one a transaction has ten messages: the machine should measure
// the relay, not commits.
type loadStep struct{ rate, perCommit int }

func loadSteps() []loadStep { return []loadStep{{latencyPerSecond, 1}, {10 * latencyPerSecond, 10}} }

// steadyRun is a steady load of one scenario.
type steadyRun struct {
	scenario string
	job      streamJob
	address  string // of the database, for the way to Kafka; empty: as for everything
	pooler   string // what is in front of the database
}

// load measures latency and CPU of the ways side by side.
func (b *relayBench) load(ctx context.Context) error {
	return b.steady(ctx, b.loads())
}

func (b *relayBench) loads() (runs []steadyRun) {
	for _, step := range loadSteps() {
		for _, way := range []string{wayRelay, wayExactly, wayPoller} {
			runs = append(runs, steadyRun{scenario: ScenarioLoad, job: streamJob{Way: way, Rate: step.rate, PerCommit: step.perCommit}})
		}
	}
	return runs
}

// network does the same with PostgreSQL a round trip away for the way to Kafka. The writers are
// close to it: their COMMIT returns at once.
func (b *relayBench) network(ctx context.Context) error {
	d, address, err := newDistance(ctx, b.DatabaseURL, networkRoundTrip)
	if err != nil {
		return err
	}
	defer d.close()
	var runs []steadyRun
	for _, way := range []string{wayRelay, wayExactly, wayPoller} {
		runs = append(runs, steadyRun{scenario: ScenarioNetwork, address: address, job: streamJob{Way: way, Rate: latencyPerSecond, PerCommit: 1}})
	}
	return b.steady(ctx, runs)
}

// pooler does the same through PgBouncer, with the relay's statements prepared and not prepared.
func (b *relayBench) pooler(ctx context.Context) error {
	p, err := startPooler(ctx, b.DatabaseURL)
	if err != nil {
		return err
	}
	if p == nil {
		b.note("pooler: left out: there is no pgbouncer on this machine")
		return nil
	}
	defer p.stop()
	var runs []steadyRun
	add := func(pooler, address string) {
		runs = append(runs, steadyRun{
			scenario: ScenarioPooler, pooler: pooler, address: address, job: streamJob{Way: wayRelay, Rate: latencyPerSecond, PerCommit: 1},
		})
	}
	add("none", "")
	if p.prepares {
		add("prepared", p.address(""))
	} else {
		b.note("pooler: PgBouncer %s does not support prepared statements: they are left out", p.version)
	}
	add("not prepared", p.address("cache_describe"))
	return b.steady(ctx, runs)
}

// steady runs each of runs in every round; the order rotates.
func (b *relayBench) steady(ctx context.Context, runs []steadyRun) error {
	for round := range b.opts.Rounds {
		for i := range runs {
			r := runs[(i+round)%len(runs)]
			r.job.Topic, r.job.Seconds, r.job.WritersURL = b.topic, b.opts.LatencySeconds, b.DatabaseURL
			r.job.Name = fmt.Sprintf("%s-%d-%d", r.scenario, round, i)
			if err := b.steadyTurn(ctx, round, r); err != nil {
				return fmt.Errorf("round %d: %s: %s: %w", round+1, r.scenario, r.job.Way, err)
			}
		}
	}
	return nil
}

func (b *relayBench) steadyTurn(ctx context.Context, round int, r steadyRun) error {
	if err := b.exec(ctx, "empty the poller's table", emptyPollerSQL); err != nil {
		return err
	}
	if err := b.exec(ctx, "empty the outbox", emptyOutboxSQL); err != nil {
		return err
	}
	if err := errors.Join(b.emptyTopic(ctx), b.checkpoint(ctx)); err != nil {
		return err
	}
	found, err := b.process(ctx, relayJob{DatabaseURL: r.address, Stream: &r.job})
	if err != nil {
		return err
	}
	f := found.Stream
	key := r.key()
	b.steadies.add(r)
	for name, value := range map[string]*float64{
		"p50": &f.P50, "p99": &f.P99, "rate": &f.PerSecond, "cpu": perMillion(f.CPUSeconds, f.Messages),
		"server": perMillion(f.ServerSeconds, f.Messages), "trip": &f.RoundTripMillis,
	} {
		if value != nil {
			b.samples.add(key+name, *value)
		}
	}
	b.note("round %d: %s %s%s, %.0f of %d a second: p50 %.2f ms, p99 %.2f ms%s%s", round+1, r.scenario, r.job.Way, inFront(r.pooler), f.PerSecond, r.job.Rate, f.P50, f.P99,
		noted(", CPU seconds a million %.0f", perMillion(f.CPUSeconds, f.Messages)), noted(" + PostgreSQL %.0f", perMillion(f.ServerSeconds, f.Messages)))
	return nil
}

func inFront(pooler string) string {
	if pooler == "" {
		return ""
	}
	return ", PgBouncer: " + pooler
}

func noted(format string, value *float64) string {
	if value == nil {
		return ""
	}
	return fmt.Sprintf(format, *value)
}

func perMillion(seconds *float64, rows int) *float64 {
	if seconds == nil || rows == 0 {
		return nil
	}
	each := *seconds / float64(rows) * 1e6
	return &each
}

// key is the key of a run's samples.
func (r steadyRun) key() string {
	return fmt.Sprintf("%s/%s/%d/%s/", r.scenario, r.job.Way, r.job.Rate, r.pooler)
}

// steadies are the runs so far, once each, in order.
type steadies []steadyRun

func (s *steadies) add(r steadyRun) {
	for _, known := range *s {
		if known.key() == r.key() {
			return
		}
	}
	*s = append(*s, r)
}
