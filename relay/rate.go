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
		if !(rate > 0 && rate <= ratePerSecondMax) { // also rejects NaN
			problems = append(problems, fmt.Errorf("Rates[%.260q] %v: want above 0, at most %d rows per second", topic, rate, ratePerSecondMax))
		}
	}
	slices.SortFunc(problems, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(problems...)
}

// rates are the topics with a rate. A row above the rate of its topic moves to outbox_dead, like a
// row of a paused topic. So progress passes it, other topics continue, and its key keeps its order.
// Each poll of dead rows hands back as many rows as the rate has allowed since the last one, the
// oldest first.
type rates struct {
	mu      sync.Mutex
	buckets map[ratedShard]*bucket
}

type ratedShard struct {
	shard int16
	topic string
}

// bucket collects allowances for rows, for a second and a half: dead rows are polled every second.
type bucket struct {
	rows float64
	at   time.Time
	// waiting: rows of the topic wait. New rows queue behind them, or they would take the allowance
	// of the waiting rows.
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

// aboveRate takes the allowance for a row. It returns an error if there is none. released: the row
// has waited.
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
	return fmt.Errorf("topic %q has a rate of %v rows per second: the row waits for its turn", topic, p.cfg.Rates[topic])
}

// allowance is how many rows of a topic may be handed back now; limited is false if there is no
// rate.
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

// noneWait clears the waiting mark of all topics that are not in waiting.
func (p *publisher) noneWait(waiting []string) {
	p.rates.mu.Lock()
	defer p.rates.mu.Unlock()
	for at, b := range p.rates.buckets {
		if at.shard == p.lease.shard && !slices.Contains(waiting, at.topic) {
			b.waiting = false
		}
	}
}

// noneWaits notes that all waiting rows of a topic are handed back: later rows need not follow
// them, except rows of the same keys.
func (p *publisher) noneWaits(topic string) {
	p.rates.mu.Lock()
	defer p.rates.mu.Unlock()
	if b := p.rated(topic); b != nil {
		b.waiting = false
	}
}

// retryRatedSQL hands back the first $3 rows that wait for the rate of their topic. It locks them
// in the order of seq; otherwise it could deadlock with operators.
const retryRatedSQL = `-- relay.retry_rated
WITH batch AS MATERIALIZED (
  SELECT seq FROM effectonce.outbox_dead
  WHERE relay = $1 AND topic = $2 AND reason = 'paused' AND state = 'held' AND shard OPERATOR(pg_catalog.%) $4::int = $5::int
  ORDER BY seq LIMIT $3 FOR UPDATE SKIP LOCKED
), handed AS (
  UPDATE effectonce.outbox_dead d SET state = 'retry' FROM batch b WHERE d.relay = $1 AND d.seq = b.seq
)
SELECT count(*) FROM batch`
