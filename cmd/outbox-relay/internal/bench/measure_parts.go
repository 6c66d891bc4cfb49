package bench

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"time"

	"github.com/google/uuid"

	"github.com/effectonce/effectonce/dedup"
)

// throughput measures consumer and relay, and what a message costs.
func (m *measurement) throughput(ctx context.Context) error {
	if err := m.refillOutbox(ctx, m.relay.opts.Rows); err != nil {
		return err
	}
	const consuming, publishing = "consume", "publish"
	consumers, relays := m.consumers(m.consume.clean), m.relays()
	if err := errors.Join(m.compare(ctx, "throughput", consuming, consumers...), m.compare(ctx, "throughput", publishing, relays...)); err != nil {
		return err
	}
	m.plot(&Plot{Name: "consumer", Title: "Consumer: messages with one insert each", Y: "messages per second"}, "throughput", "", []string{consuming}, consumers...)
	m.plot(&Plot{Name: "relay", Title: "Relay: drain of a backlog", Y: "rows per second"}, "throughput", "", []string{publishing}, relays...)
	m.costs("consumer", consuming, consumers)
	m.costs("relay", publishing, relays)
	return nil
}

// costs makes plots of what a message costs.
func (m *measurement) costs(name, at string, ways []way) {
	cpu := &Plot{Name: name + "-cpu", Title: "CPU time, " + name, Y: "microseconds per message", LessIsBetter: true}
	for _, part := range []struct{ place, suffix string }{{"process, with Kafka if that is in it", "/cpu"}, {"PostgreSQL", "/server"}} {
		for _, w := range ways {
			key := "throughput"
			cpu.add(w.name, part.place, m.samples[sampleKey(key, w.name, at)+part.suffix], w.against, m.samples[sampleKey(key, w.against, at)+part.suffix])
		}
	}
	if len(cpu.Series) > 0 {
		m.results.Plots = append(m.results.Plots, cpu)
	}
	m.plot(&Plot{Name: name + "-wal", Title: "Write-ahead log, " + name, Y: "bytes per message", LessIsBetter: true}, "throughput", "/wal", []string{at}, ways...)
}

// keysPart measures idempotency keys.
func (m *measurement) keysPart(ctx context.Context) error {
	var places []string
	var ways []way
	for _, http := range []bool{false, true} {
		for _, statements := range []int{2, 8} {
			at := fmt.Sprintf("%d statements", statements)
			if http {
				at += ", HTTP"
			}
			k, err := m.newKeys(ctx, statements, http)
			if err != nil {
				return err
			}
			ways = k.ways(m)
			err = m.compare(ctx, "keys", at, ways...)
			k.close()
			if err != nil {
				return err
			}
			places = append(places, at)
		}
	}
	m.plot(&Plot{Name: "keys", Title: "Idempotency keys: 32 connections", Y: "requests per second"}, "keys", "", places, ways...)
	m.plot(&Plot{Name: "keys-wal", Title: "Idempotency keys: write-ahead log", Y: "bytes per request", LessIsBetter: true}, "keys", "/wal", places, ways[:2]...)
	return nil
}

// networkPart measures all with PostgreSQL away. The proxy is there for 0 ms, too.
func (m *measurement) networkPart(ctx context.Context) error {
	if err := m.refillOutbox(ctx, m.relay.opts.Rows); err != nil {
		return err
	}
	near := m.DatabaseURL
	defer func() { m.DatabaseURL = near }()
	var places []string
	consumers, relays := m.consumers(m.consume.clean), m.relays()[:2]
	consumers = []way{consumers[0], consumers[2]}
	var keys []way
	for _, away := range []time.Duration{0, time.Millisecond, 3 * time.Millisecond} {
		d, address, err := newDistance(ctx, near, away)
		if err != nil {
			return err
		}
		m.DatabaseURL = address
		at := strconv.FormatInt(away.Milliseconds(), 10) + " ms"
		places = append(places, at)
		k, err := m.newKeys(ctx, 2, false)
		if err != nil {
			d.close()
			return err
		}
		keys = k.ways(m)
		err = errors.Join(
			m.compare(ctx, "network-consumer", at, consumers...), m.compare(ctx, "network-relay", at, relays...), m.compare(ctx, "network-keys", at, keys...))
		k.close()
		d.close()
		m.DatabaseURL = near
		if err != nil {
			return err
		}
	}
	for _, p := range []struct {
		name, title, y string
		ways           []way
	}{{"consumer", "Consumer", "messages per second", consumers}, {"relay", "Relay", "rows per second", relays}, {"keys", "Idempotency keys", "requests per second", keys}} {
		m.plot(&Plot{Name: "network-" + p.name, Title: p.title + " with PostgreSQL away", Kind: kindLines, X: "round trip", Y: p.y}, "network-"+p.name, "", places, p.ways...)
	}
	return nil
}

// latencyPart measures the time from commit to consumable at two rates.
func (m *measurement) latencyPart(ctx context.Context) error {
	if len(m.opts.Command) == 0 {
		return nil
	}
	b := m.relay
	if err := b.load(ctx); err != nil {
		return err
	}
	for _, q := range []struct{ name, title string }{{"p50", "median"}, {"p99", "99th percentile"}} {
		p := &Plot{Name: "latency-" + q.name, Title: "From commit to consumable: " + q.title, Y: "milliseconds", LessIsBetter: true}
		for _, step := range loadSteps() {
			poller := steadyRun{scenario: ScenarioLoad, job: streamJob{Way: wayPoller, Rate: step.rate}}
			for _, w := range []struct{ way, name, against string }{{wayPoller, "poller every 5 ms", ""}, {wayRelay, "relay", "poller every 5 ms"}, {wayExactly, "relay, exactly once", "poller every 5 ms"}} {
				run := poller
				run.job.Way = w.way
				p.add(w.name, number(float64(step.rate))+" per second", b.samples[run.key()+q.name], w.against, b.samples[poller.key()+q.name])
			}
		}
		m.results.Plots = append(m.results.Plots, p)
	}
	return nil
}

// growth measures the consumer with claims in the table, and the relay with rows in the outbox.
func (m *measurement) growth(ctx context.Context) error {
	return errors.Join(m.growthOfClaims(ctx), m.growthOfOutbox(ctx))
}

func (m *measurement) growthOfClaims(ctx context.Context) error {
	claims, err := dedup.New(dedup.Config{Schema: m.schema})
	if err != nil {
		return err
	}
	registered, err := claims.Register(ctx, m.pool, dedup.Registration{Name: "growth", Group: "growth"})
	if err != nil {
		return err
	}
	ways := m.consumers(func(ctx context.Context) error { return m.exec(ctx, "empty the effects", emptyEffectsSQL) })
	ways = []way{ways[0], ways[2]}
	bytes := &Plot{Name: "growth-claims-bytes", Title: "Claims: table and index", Kind: kindLines, X: "claims", Y: "bytes per claim", LessIsBetter: true}
	pages := &Plot{Name: "growth-claims-pages", Title: "Claims: pages of a look-up", Kind: kindLines, X: "claims", Y: "pages", LessIsBetter: true}
	var places []string
	for _, n := range m.opts.Claims {
		at := number(float64(n))
		places = append(places, at)
		if err := m.consume.clean(ctx); err != nil {
			return err
		}
		if m.consume.opts.Preload = n; n > 0 {
			m.opts.Progress(fmt.Sprintf("copying %d claims, and as many for the textbook", n))
			if err := errors.Join(m.consume.preload(ctx, registered, messageID), m.exec(ctx, "copy the textbook's claims", copyTextbookSQL)); err != nil {
				return err
			}
			if err := m.sizes(ctx, n, at, bytes, pages); err != nil {
				return err
			}
		}
		if err := m.compare(ctx, "growth-claims", at, ways...); err != nil {
			return err
		}
	}
	m.plot(&Plot{Name: "growth-claims", Title: "Consumer, with claims of a week in the table", Kind: kindLines, X: "claims", Y: "messages per second"}, "growth-claims", "", places, ways...)
	m.results.Plots = append(m.results.Plots, bytes, pages)
	return nil
}

var sharedPages = regexp.MustCompile(`Buffers: shared(?: hit=(\d+))?(?: read=(\d+))?`)

func (m *measurement) sizes(ctx context.Context, n int, at string, bytes, pages *Plot) error {
	var id uuid.UUID
	var owner int
	if err := m.pool.QueryRow(ctx, m.sql(someClaimSQL), n/2).Scan((*[16]byte)(&id), &owner); err != nil {
		return fmt.Errorf("find a claim: %w", err)
	}
	for _, t := range []struct{ name, size, lookUp string }{
		{"textbook", textbookBytesSQL, textbookLookUpSQL}, {"claims", claimBytesSQL, claimLookUpSQL},
	} {
		size, err := m.number(ctx, "the size of the claims", t.size)
		if err != nil {
			return err
		}
		bytes.add(t.name, at, []float64{float64(size) / float64(n)}, "", nil)
		rows, err := m.pool.Query(ctx, fmt.Sprintf(m.sql(t.lookUp), id, owner))
		if err != nil {
			return fmt.Errorf("look up a claim: %w", err)
		}
		var read float64
		for rows.Next() {
			var line string
			if err := rows.Scan(&line); err != nil {
				return fmt.Errorf("look up a claim: %w", err)
			}
			if found := sharedPages.FindStringSubmatch(line); found != nil && read == 0 {
				hit, _ := strconv.ParseFloat(found[1], 64) // none: 0
				missed, _ := strconv.ParseFloat(found[2], 64)
				read = hit + missed
			}
		}
		if err := rows.Err(); err != nil {
			return fmt.Errorf("look up a claim: %w", err)
		}
		pages.add(t.name, at, []float64{read}, "", nil)
	}
	return nil
}

func (m *measurement) growthOfOutbox(ctx context.Context) error {
	var places []string
	var ways []way
	for _, n := range m.opts.Rows {
		at := number(float64(n))
		places = append(places, at)
		if err := m.refillOutbox(ctx, n); err != nil {
			return err
		}
		ways = m.relays()[:2]
		if err := m.compare(ctx, "growth-outbox", at, ways...); err != nil {
			return err
		}
	}
	m.plot(&Plot{Name: "growth-outbox", Title: "Relay: backlogs of several sizes", Kind: kindLines, X: "rows", Y: "rows per second"}, "growth-outbox", "", places, ways...)
	return nil
}
