package torture

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/consumer"
)

type shape string

const (
	shapeEach   shape = "each"
	shapeQueued shape = "queued"
	shapeBatch  shape = "batch"
)

// Plan is what a seed draws: the pipeline, and what happens to it when. Everything else is chance of the
// machine.
type Plan struct {
	Seed        uint64
	ExactlyOnce bool // the relay
	Shards      int16
	Again       bool // records are produced again, with their headers
	Scheduled   bool // some messages have a DeliverAt, so that order ends
	Flooded     bool // thousands of orders are placed at once
	Retention   bool // records are deleted as soon as all groups have passed them: commits are not lost then
	Groups      []GroupPlan
	Faults      []Fault
}

// GroupPlan is a consumer group with two replicas.
type GroupPlan struct {
	Shape  shape
	Topics []string
	child  string // the topic that it publishes to; empty: to none
	config consumer.Config
	// configs of the replicas: the second has other limits, as during a deployment.
	configs [2]consumer.Config
}

// Fault is one of the nemesis. Which of several things it concerns follows from Choice.
type Fault struct {
	At     time.Duration
	What   string
	Choice int
	Lasts  time.Duration
}

const (
	topicOrders = "torture-orders"
	topicMore   = "torture-more"
	topicChild  = "torture-children"
	topicDead   = "torture-dead"

	partitions = 3
	keysAll    = 40

	faultGapMin, faultGapMax = 20 * time.Millisecond, 420 * time.Millisecond
	faultLastsMax            = 6 * time.Second // longer than a lease, a session and every limit of a handler
)

// draw makes the plan of a seed.
func draw(seed uint64, duration time.Duration, faults []string) *Plan {
	random := rand.New(rand.NewPCG(seed, 1)) //nolint:gosec // repeatable
	p := &Plan{Seed: seed, ExactlyOnce: random.IntN(3) > 0, Shards: pick[int16](random, 1, 1, 3), Scheduled: random.IntN(2) == 0}
	p.Again = random.IntN(2) == 0
	p.Flooded, p.Retention = random.IntN(3) == 0, random.IntN(3) == 0
	byPosition, letters := p.ExactlyOnce && !p.Again, random.IntN(12) // of one group in every fourth plan
	for i := range 3 {
		g := GroupPlan{Shape: pick(random, shapeEach, shapeEach, shapeQueued, shapeBatch), Topics: []string{topicOrders, topicMore}, child: topicChild}
		if i == 2 {
			g.Topics, g.child = []string{topicChild}, ""
		}
		if p.Flooded {
			g.Shape = shapeBatch
		}
		g.config = consumer.Config{
			Group: fmt.Sprint("torture-", i), Topics: g.Topics,
			Order:      pick(random, consumer.OrderByPartition, consumer.OrderByKey, consumer.OrderUnordered),
			OnConflict: pick(random, consumer.OnConflictPark, consumer.OnConflictDrop),
			BatchMax:   pick(random, 1, 5, 50, 500), AttemptsMax: pick(random, 3, 10), ParkShareMax: pick(random, 1, 1, 0.5),
			DrainMax:  pick(random, 200*time.Millisecond, 2*time.Second),
			OnFailure: pick(random, consumer.OnFailurePark, consumer.OnFailurePark, consumer.OnFailureBlock),
			RetryMin:  20 * time.Millisecond, RetryMax: 500 * time.Millisecond,
		}
		if i == letters {
			g.config.OnFailure, g.config.DeadLetterTopic = consumer.OnFailureDeadLetter, topicDead
		}
		patience := pick(random, time.Second, time.Second, 5*time.Second) // more than session: what is frozen outlives its membership
		g.config.HandlerTimeout, g.config.StatementTimeout, g.config.IdleTimeout = patience, patience, patience*7/10
		g.config.LockTimeout = 800 * time.Millisecond
		switch {
		case byPosition && random.IntN(2) == 0:
			g.config.Dedup, g.config.Order = consumer.DedupByPosition, consumer.OrderByPartition
		case g.config.Order != consumer.OrderByPartition:
			g.config.Workers = 1 + random.IntN(4)
		case random.IntN(4) == 0:
			g.config.Isolation = pick(random, pgx.RepeatableRead, pgx.Serializable)
		}
		g.config.Forever = g.config.Dedup == consumer.DedupByID && random.IntN(5) == 0
		g.configs = [...]consumer.Config{g.config, g.config}
		other := &g.configs[1]
		other.BatchMax, other.AttemptsMax, other.DrainMax = pick(random, 1, 20, 500), pick(random, 2, 10), pick(random, 500*time.Millisecond, time.Second)
		if p.Flooded {
			g.configs[0].BatchMax, other.BatchMax = 500, 200
		}
		p.Groups = append(p.Groups, g)
	}
	gapMax := pick(random, faultGapMax, faultGapMax, 4*faultGapMax) // where faults are rare, more happens between them
	if p.Flooded {
		gapMax = 4 * faultGapMax
	}
	for at := faultGapMax; at < duration; at += between(random, faultGapMin, gapMax) {
		p.Faults = append(p.Faults, Fault{at, pick(random, faults...), random.IntN(1 << 16), between(random, 0, faultLastsMax)})
	}
	return p
}

// rarely is one of how many messages has a habit: some take seconds.
func (p *Plan) rarely(of int) int {
	if p.Flooded {
		return 500 * of
	}
	return of
}

// drawHabit draws what the handlers of a message do: one of so many has a habit.
func (r *run) drawHabit(random *rand.Rand, of int) string {
	if random.IntN(of) > 0 {
		return ""
	}
	name := pick(random, slices.Sorted(maps.Keys(r.habits))...)
	if r.habits[name].leaves && r.Rival != nil || slices.Contains(r.Without, name) {
		return ""
	}
	return name
}

func pick[T any](random *rand.Rand, of ...T) T { return of[random.IntN(len(of))] }

func between(random *rand.Rand, low, high time.Duration) time.Duration {
	return low + time.Duration(random.Int64N(int64(high-low)))
}

// String is the plan for people.
func (p *Plan) String() string {
	var text strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&text, format, args...) }
	say("seed %d: relay exactly once %v, %d shards; records again %v, scheduled %v, flooded %v, retention %v\n",
		p.Seed, p.ExactlyOnce, p.Shards, p.Again, p.Scheduled, p.Flooded, p.Retention)
	for _, g := range p.Groups {
		c := g.config
		say("%s: %s, order %v, workers %d, batch %d, isolation %q, dedup %v, forever %v, attempts %d, share %v, failure %v, drain %v, timeout %v\n",
			c.Group, g.Shape, c.Order, c.Workers, c.BatchMax, c.Isolation, c.Dedup, c.Forever, c.AttemptsMax, c.ParkShareMax, c.OnFailure, c.DrainMax, c.HandlerTimeout)
	}
	for i, f := range p.Faults {
		say("fault %d at %v: %s, choice %d, for %v\n", i, f.At.Round(time.Millisecond), f.What, f.Choice, f.Lasts.Round(time.Millisecond))
	}
	return text.String()
}
