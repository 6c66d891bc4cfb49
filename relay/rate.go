package relay

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// ratePerSecondMax bounds Config.Rates.
const ratePerSecondMax = 1_000_000

func validateRates(all map[string]float64) error {
	var problems []error
	for topic, rate := range all {
		if !topicName.MatchString(topic) {
			problems = append(problems, fmt.Errorf("%s[%.260q]: want the name of a topic, 1 to 249 letters, digits, dots, underscores and hyphens", "Rates", topic))
		}
		if !(rate > 0 && rate <= ratePerSecondMax) { // also what is no number
			problems = append(problems, fmt.Errorf("Rates[%.260q] %v: want above 0, at most %d rows per second", topic, rate, ratePerSecondMax))
		}
	}
	slices.SortFunc(problems, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(problems...)
}

// rates are the topics with a rate. A row above the rate of its topic moves to outbox_dead, as one of a paused topic does:
// so progress passes it, other topics flow, and its key keeps its order. Each look at dead rows hands back as many as the
// rate allows meanwhile, from the oldest on.
type rates struct {
	mu      sync.Mutex
	buckets map[ratedShard]*bucket
}

type ratedShard struct {
	shard int16
	topic string
}

// bucket gathers allowances for rows, for a second and a half: dead rows are looked at every second.
type bucket struct {
	rows float64
	at   time.Time
	// waiting: rows of the topic wait. New ones go behind them, or they would take what the others wait for.
	waiting bool
}

const rateGather = 1.5 // seconds

// rated returns the bucket of a topic for this shard, nil if there is no rate. Under the lock.
func (p *publisher) rated(topic string) *bucket {
	perSecond := p.cfg.Rates[topic] / float64(p.lease.shards)
	if perSecond == 0 {
		return nil
	}
	at := ratedShard{p.lease.shard, topic}
	b := p.rates.buckets[at]
	if b == nil {
		if p.rates.buckets == nil {
			p.rates.buckets = map[ratedShard]*bucket{}
		}
		b = &bucket{rows: max(1, perSecond), at: time.Now()}
		p.rates.buckets[at] = b
	}
	now := time.Now()
	b.rows = min(b.rows+now.Sub(b.at).Seconds()*perSecond, max(1, rateGather*perSecond))
	b.at = now
	return b
}

// aboveRate takes the allowance for a row. It returns why there is none. released: the row waited.
func (p *publisher) aboveRate(topic string, released bool) error {
	if len(p.cfg.Rates) == 0 {
		return nil
	}
	p.rates.mu.Lock()
	defer p.rates.mu.Unlock()
	b := p.rated(topic)
	if b == nil {
		return nil
	}
	if b.rows >= 1 && (released || !b.waiting) {
		b.rows--
		return nil
	}
	b.waiting = true
	return fmt.Errorf("topic %q has a rate of %v rows per second: the row is published in its turn", topic, p.cfg.Rates[topic])
}

// allowance is how many rows of a topic may be handed back now; limited is false where there is no rate.
func (p *publisher) allowance(topic string) (rows int, limited bool) {
	p.rates.mu.Lock()
	defer p.rates.mu.Unlock()
	b := p.rated(topic)
	if b == nil {
		return 0, false
	}
	b.waiting = true
	return int(b.rows), true
}

// noneWait notes for which topics no row waits any more.
func (p *publisher) noneWait(waiting []string) {
	p.rates.mu.Lock()
	defer p.rates.mu.Unlock()
	for at, b := range p.rates.buckets {
		if at.shard == p.lease.shard && !slices.Contains(waiting, at.topic) {
			b.waiting = false
		}
	}
}

// noneWaits notes that all rows of a topic that waited are handed back: later ones need not follow them, but for those of
// their keys.
func (p *publisher) noneWaits(topic string) {
	p.rates.mu.Lock()
	defer p.rates.mu.Unlock()
	if b := p.rated(topic); b != nil {
		b.waiting = false
	}
}

// retryRatedSQL hands back the first $3 rows that wait for the rate of their topic, in the order of seq, or it could
// deadlock with operators.
const retryRatedSQL = `-- relay.retry_rated
WITH batch AS MATERIALIZED (
  SELECT seq FROM effectonce.outbox_dead
  WHERE relay = $1 AND topic = $2 AND reason = 'paused' AND state = 'held' AND shard % $4::int = $5::int
  ORDER BY seq LIMIT $3 FOR UPDATE SKIP LOCKED
), handed AS (
  UPDATE effectonce.outbox_dead d SET state = 'retry' FROM batch b WHERE d.relay = $1 AND d.seq = b.seq
)
SELECT count(*) FROM batch`
