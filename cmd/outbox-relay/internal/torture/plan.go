package torture

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
)

// Plan is all that is drawn for one round. Its JSON form can be read, cut and run again.
type Plan struct {
	Seed   uint64      `json:"seed"`
	Round  int         `json:"round"`
	Scene  scene.Scene `json:"scene"`
	Faults []Fault     `json:"faults"`
}

// Fault is one thing that goes wrong, or that an operator does.
type Fault struct {
	At     time.Duration `json:"at"` // since the round's first effect
	Kind   string        `json:"kind"`
	For    time.Duration `json:"for,omitempty"`
	Choice int           `json:"choice"` // among the targets that there are at that moment
}

// kind is how often a fault is drawn, and how long it lasts.
type kind struct {
	name     string
	weight   int
	min, max time.Duration // 0: it does not last
	// fits reports whether it can be asked of a scene on these servers.
	fits func(s scene.Scene, on Abilities) bool
}

// Abilities are what the servers of a run can bear.
type Abilities struct {
	KillKafka bool `json:"kill_kafka"`
	Promote   bool `json:"promote"`
	Brokers   int  `json:"brokers"` // of Kafka
	Fake      bool `json:"fake"`    // kfake
	Dump      bool `json:"dump"`
	Pooler    bool `json:"pooler"`
}

func always(scene.Scene, Abilities) bool { return true }

// byID: every group recognises a copy of a record.
func byID(s scene.Scene, _ Abilities) bool {
	return !slices.ContainsFunc(s.Groups, func(g scene.Group) bool { return g.Dedup == "position" })
}

// forgets: there are claims that are old enough to be forgotten.
func forgets(s scene.Scene, _ Abilities) bool { return s.Producers.Old > 0 }

// dumps: the relay publishes again what is above its floor.
func dumps(s scene.Scene, on Abilities) bool { return on.Dump && byID(s, on) }

// maySetBack reports whether the outbox's sequence may be set back. Writers then fail with "duplicate
// key" until it is repaired. In a group that dead-letters, these errors would use up the attempts of
// sound messages whose handlers publish.
func maySetBack(s scene.Scene, on Abilities) bool {
	return byID(s, on) && !slices.ContainsFunc(s.Groups, func(g scene.Group) bool { return g.DeadLetter })
}

func proxied(s scene.Scene, _ Abilities) bool { return s.Proxies }

// kinds in the order in which they are drawn: a new one belongs at the end, so that a seed keeps as
// much of its meaning as it can.
func kinds() []kind {
	second := time.Second
	return append([]kind{
		{"kill", 30, 0, 0, always},
		{"freeze", 14, second / 2, 10 * second, always},
		{"restart", 6, 0, 0, always},
		{"other-settings", 6, 0, 0, always},
		{"end-sessions", 30, 0, 0, always},
		{"end-all-sessions", 3, 0, 0, always},
		{"crash-postgres", 2, 0, 2 * second, always},
		{"crash-kafka", 1, 0, 4 * second, func(_ scene.Scene, on Abilities) bool { return on.KillKafka }},
		{"cut", 16, second / 10, 4 * second, proxied},
		{"silence", 10, second / 2, 7 * second, proxied},
		{"deafen", 6, second / 2, 7 * second, proxied},
		{"slow", 6, second, 5 * second, proxied},
		{"reset", 10, second / 10, second, proxied},
		{"long-transaction", 3, second, 10 * second, always},
		{"prepared-transaction", 2, second, 8 * second, always},
		{"lock-table", 2, second / 10, 2 * second, always},
		{"copies", 14, 0, 0, byID},
		{"pause-topic", 3, second / 2, 4 * second, always},
		{"pause-group", 3, second / 2, 4 * second, always},
		{"move-back", 4, 0, 0, byID},
		{"retry-parked", 4, 0, 0, always},
		{"retry-dead", 2, 0, 0, always},
		{"reshard", 2, 0, 0, always},
		{"prune", 3, 0, 0, always},
		{"migrate", 1, 0, 0, always},
		{"replay", 2, 0, 0, byID},
		{"vacuum", 2, 0, 0, always},
		{"garbage", 2, 0, 0, always},
		{"conflict", 5, 0, 0, func(s scene.Scene, on Abilities) bool { return byID(s, on) && !on.Promote }},
		{"lower-limit", 3, second / 10, 2 * second, always},
		{"promote", 2, second / 10, 2 * second, func(_ scene.Scene, on Abilities) bool { return on.Promote }},
		{"forget-claims", 8, 0, 0, forgets},
		{"late-copies", 12, 0, 0, forgets},
		{"decide-expired", 4, 0, 0, forgets},
		{"set-sequence-back", 2, second / 10, 5 * second, maySetBack},
		{"dump-and-restore", 1, 0, 0, dumps},
		{"logical-copy", 1, 0, 0, func(s scene.Scene, on Abilities) bool { return dumps(s, on) && maySetBack(s, on) }},
		{"freeze-backend", 8, second / 2, 8 * second, always},
	}, append(kafkaKinds(), poolerKinds()...)...)
}

// Draw makes the plan of a round. seconds is how long it takes, rate the orders per second at most;
// pace is faults per second on average.
func Draw(seed uint64, round, seconds, rate int, pace float64, on Abilities) Plan {
	random := rand.New(rand.NewPCG(seed, uint64(round))) //nolint:gosec // a seed
	p := Plan{Seed: seed, Round: round, Scene: drawScene(random, seconds, rate)}
	enrich(rand.New(rand.NewPCG(seed, 1<<32|uint64(round))), &p.Scene)        //nolint:gosec // a seed
	drawRetention(rand.New(rand.NewPCG(seed, 2<<32|uint64(round))), &p.Scene) //nolint:gosec // a seed
	if on.Pooler {
		p.Scene.Pooler = pick(rand.New(rand.NewPCG(seed, 3<<32|uint64(round))), 0, 0, 10, 40) //nolint:gosec // a seed
	}
	if on.Promote {
		p.Scene.Proxies, p.Scene.Pooler = false, 0 // they lead to one server
	}
	var fitting []kind
	total := 0
	for _, k := range kinds() {
		if k.fits(p.Scene, on) {
			fitting = append(fitting, k)
			total += k.weight
		}
	}
	end := time.Duration(seconds) * time.Second
	for at := time.Duration(0); ; {
		at += time.Duration(random.ExpFloat64() / pace * float64(time.Second))
		if at >= end {
			break
		}
		n := random.IntN(total)
		i := 0
		for ; n >= fitting[i].weight; i++ {
			n -= fitting[i].weight
		}
		f := Fault{At: at.Round(time.Millisecond), Kind: fitting[i].name, Choice: random.IntN(1 << 16)}
		if k := fitting[i]; k.max > 0 {
			// Short ones are more frequent than long ones.
			f.For = k.min + time.Duration(random.Float64()*random.Float64()*float64(k.max-k.min)).Round(time.Millisecond)
		}
		p.Faults = append(p.Faults, f)
	}
	slices.SortStableFunc(p.Faults, func(a, b Fault) int { return cmp.Compare(a.At, b.At) })
	return p
}

// For makes the plan one for a rival: without what only the engine has, its operators' commands and
// its failure policies, and with the same faults otherwise.
func (p Plan) For(rival string) Plan {
	s := p.Scene
	s.Rival, s.Trouble, s.Service, s.SmallRecords, s.Lazy = rival, 0, false, false, false
	s.Producers.Later, s.Producers.Old, s.Relay.ExactlyOnce = 0, 0, false
	s.Groups = slices.Clone(s.Groups)
	for i := range s.Groups {
		g := &s.Groups[i]
		g.Order, g.DeadLetter, g.Calls, g.Journal, g.Fences = "partition", false, false, false, false
		if g.Dedup == "position" {
			g.Dedup = "id" // a position recognises no second record, and now relays are at-least-once
		}
	}
	p.Scene = s
	common := []string{
		"kill", "freeze", "restart", "end-sessions", "end-all-sessions", "crash-postgres", "crash-kafka", "cut", "silence", "deafen", "slow", "reset",
		"long-transaction", "prepared-transaction", "copies", "promote", "move-leader", "move-coordinator", "kafka-errors", "kill-pooler",
	}
	p.Faults = slices.DeleteFunc(slices.Clone(p.Faults), func(f Fault) bool { return !slices.Contains(common, f.Kind) })
	return p
}

// Bulk makes the plan one of many messages: with large transactions, batches and backlogs, without
// what is slow by itself. Its faults are the same.
func (p Plan) Bulk(rate int) Plan {
	s := p.Scene
	s.Rate, s.Mild = rate, false
	s.Partitions, s.Keys, s.Backlog, s.Padding, s.Trouble, s.SmallRecords = max(4, s.Partitions), max(100, s.Keys), 300_000, 0, min(s.Trouble, 30), false
	s.Producers = scene.Producers{Processes: 2, Writers: 4, BatchMax: 1000, Buffer: s.Producers.Buffer}
	s.Relay.PageRows = max(1000, s.Relay.PageRows)
	s.Groups = slices.Clone(s.Groups)
	for i := range s.Groups {
		g := &s.Groups[i]
		g.Shape, g.BatchMax = scene.ShapeBatch, max(500, g.BatchMax)
		g.Calls, g.Journal, g.Fences = false, false, false // no part of a batch
	}
	p.Scene = s
	return p
}

func pick[T any](random *rand.Rand, from ...T) T { return from[random.IntN(len(from))] }

func oneIn(random *rand.Rand, n int) bool { return random.IntN(n) == 0 }

// drawScene draws the configuration of a round.
func drawScene(random *rand.Rand, seconds, rate int) scene.Scene {
	exactly := oneIn(random, 3)
	s := scene.Scene{
		Seconds: seconds, Partitions: pick(random, 1, 2, 4, 6, 8), Keys: pick(random, 20, 100, 1000),
		Rate: rate, Backlog: pick(random, int64(2_000), 20_000, 100_000), Padding: pick(random, 0, 0, 300, 1500),
		Trouble: pick(random, 0, 300, 3000), Lazy: oneIn(random, 3), SmallRecords: oneIn(random, 5), Service: oneIn(random, 2), Proxies: oneIn(random, 3),
		Producers: scene.Producers{
			Processes: pick(random, 1, 2), Writers: pick(random, 1, 2, 4), BatchMax: pick(random, 1, 50, 400, 1000, 1000),
			Pauses: oneIn(random, 3), Buffer: oneIn(random, 3), Later: pick(random, 0, 0, 10, 200),
		},
		Relay: scene.Relay{
			Replicas: pick(random, 1, 2, 3), Shards: pick(random, int16(1), 1, 2, 3), ExactlyOnce: exactly,
			PageRows: pick(random, 50, 1000, 5000), Keep: pick(random, 200*time.Millisecond, time.Second, 10*time.Second), Notify: oneIn(random, 4),
		},
	}
	for n := range int16(pick(random, 1, 2)) {
		g := drawGroup(random, n+1, exactly)
		s.Groups = append(s.Groups, g)
		if g.Children {
			child := drawGroup(random, 100+g.Number, false)
			child.Parent, child.Children, child.Calls, child.DeadLetter = g.Number, false, false, false
			s.Groups = append(s.Groups, child)
		}
	}
	return s
}

// drawRetention draws messages whose IDs are days old, so that their claims are forgotten during the
// round. A group that dead-letters has none of them: it would dead-letter what nothing is wrong with.
func drawRetention(random *rand.Rand, s *scene.Scene) {
	old := pick(random, 0, 0, 100, 1000)
	if slices.ContainsFunc(s.Groups, func(g scene.Group) bool { return g.DeadLetter || g.Dedup == "position" }) {
		old = 0
	}
	s.Producers.Old = old
	for i := range s.Groups {
		window := pick(random, time.Minute, time.Hour, 2*day, 4*day)
		if old > 0 && !s.Groups[i].Forever {
			s.Groups[i].Window = window
		}
	}
}

const day = 24 * time.Hour

func drawGroup(random *rand.Rand, number int16, exactly bool) scene.Group {
	g := scene.Group{
		Number: number, Members: pick(random, 1, 2, 3), Shape: pick(random, scene.ShapeBatch, scene.ShapeBatch, scene.ShapeQueued, scene.ShapeEach),
		Order: pick(random, "partition", "partition", "key", "none"), Workers: pick(random, 2, 4), Dedup: pick(random, "id", "id", "payload"),
		Forever: oneIn(random, 4), Isolation: pick(random, "read committed", "read committed", "repeatable read", "serializable"),
		BatchMax: pick(random, 10, 200, 500, 2000), AttemptsMax: pick(random, 1, 3, 5), DeadLetter: oneIn(random, 5),
		Children: oneIn(random, 2), Calls: oneIn(random, 2),
	}
	if g.DeadLetter && g.Calls {
		g.AttemptsMax = 5 // calls fail by themselves; a sound message may fail this often one after the other once in millions
	}
	if exactly && oneIn(random, 3) {
		g.Dedup, g.Order = "position", "partition" // a position stops only what is handled in its order
	}
	return g
}

// Of a scene with much mild trouble.
const (
	mildTrouble = 30_000 // of a million messages
	mildRate    = 2_000
	mildBacklog = 5_000
)

// enrich draws what was added later, from a stream of its own: seeds keep their meaning otherwise.
func enrich(random *rand.Rand, s *scene.Scene) {
	if oneIn(random, 5) {
		s.Mild, s.Trouble, s.SmallRecords = true, mildTrouble, false
		s.Rate, s.Backlog = min(s.Rate, mildRate), min(s.Backlog, mildBacklog)
	}
	for i := range s.Groups {
		g := &s.Groups[i]
		single := g.Shape == scene.ShapeEach && g.Parent == 0
		g.Fences = oneIn(random, 2) && single
		// All handlers queue at one row: without order they would meet at balances in deadlocks, with
		// a stricter isolation each would fail that waited, and one that waits too long has failed.
		g.Journal = oneIn(random, 2) && single && g.Order != "none" && g.Isolation == "read committed" && !g.DeadLetter
	}
}
