package demo

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/pause"
)

// fault is one fault of one process.
type fault struct {
	at     time.Duration // since the start of the run
	role   role
	target int           // among the processes of the role
	freeze time.Duration // 0: kill
}

// habit is how often a role has faults, and which.
type habit struct {
	role             role
	gapMin, gapMax   time.Duration
	iceMin, iceMax   time.Duration // how long a freeze lasts
	first            time.Duration
	freezesPerFaults float64
}

// habits returns the habits of the roles. A freeze outlasts what the others wait for, so that the
// frozen process wakes up as a zombie: another process has its lease or its partitions. Consumers
// get longer gaps than relays because the group waits for a whole session before it reassigns a
// dead member's partitions.
func habits(session time.Duration) []habit {
	return []habit{
		{
			role: roleConsumer, first: 1500 * time.Millisecond, gapMin: session / 2, gapMax: session,
			iceMin: session + 500*time.Millisecond, iceMax: session + 2*time.Second, freezesPerFaults: 0.4,
		},
		{
			role: roleRelay, first: time.Second, gapMin: 1200 * time.Millisecond, gapMax: 2800 * time.Millisecond,
			iceMin: lease + 500*time.Millisecond, iceMax: 2 * lease, freezesPerFaults: 0.4,
		},
		{
			role: roleShop, first: 2 * time.Second, gapMin: 2 * time.Second, gapMax: 4 * time.Second,
			iceMin: 300 * time.Millisecond, iceMax: 1200 * time.Millisecond, freezesPerFaults: 0.3,
		},
	}
}

// plan draws the faults of a run, by time. The first fault of every role is a freeze and the second
// a kill, so that the shortest run has both.
func plan(random *rand.Rand, duration, session time.Duration) []fault {
	var faults []fault
	for _, h := range habits(session) {
		at := h.first
		for n := 0; at < duration; n++ {
			f := fault{at: at, role: h.role, target: random.IntN(1 << 16)}
			freezes := random.Float64() < h.freezesPerFaults
			ice := between(random, h.iceMin, h.iceMax)
			if n == 0 || n > 1 && freezes {
				f.freeze = ice
			}
			faults = append(faults, f)
			at += between(random, h.gapMin, h.gapMax)
		}
	}
	slices.SortStableFunc(faults, func(a, b fault) int { return int(a.at - b.at) })
	return faults
}

func between(random *rand.Rand, low, high time.Duration) time.Duration {
	return low + time.Duration(random.Int64N(int64(high-low)+1))
}

// troublemaker carries out a plan.
type troublemaker struct {
	fleet          *fleet
	kills, freezes atomic.Int64
}

// run returns when the plan is done or ctx ends, with every process resumed.
func (t *troublemaker) run(ctx context.Context, start time.Time, faults []fault) error {
	var running sync.WaitGroup
	var mu sync.Mutex
	var problems []error
	for _, f := range faults {
		if !pause.For(ctx, time.Until(start.Add(f.at))) {
			break
		}
		p, ice := t.choose(f)
		if p == nil {
			continue
		}
		running.Go(func() {
			if err := t.strike(ctx, p, ice); err != nil {
				mu.Lock()
				defer mu.Unlock()
				problems = append(problems, err)
			}
		})
	}
	running.Wait()
	return errors.Join(problems...)
}

// choose picks a running process and its fault. If only one process of a role with several is
// running, it is killed, because it returns from that soon: if all were frozen, the run would only
// wait.
func (t *troublemaker) choose(f fault) (p *process, ice time.Duration) {
	all := t.fleet.of(f.role)
	healthy := slices.DeleteFunc(slices.Clone(all), func(p *process) bool { return !p.healthy() })
	switch {
	case len(healthy) == 0:
		return nil, 0
	case len(healthy) == 1 && len(all) > 1:
		return healthy[0], 0
	}
	return healthy[f.target%len(healthy)], f.freeze
}

// strike freezes a process and resumes it, or kills it.
func (t *troublemaker) strike(ctx context.Context, p *process, ice time.Duration) error {
	if ice > 0 {
		if err := p.freeze(); err != nil {
			return err
		}
		t.freezes.Add(1)
		pause.For(ctx, ice)
		return p.resume()
	}
	if err := p.kill(); err != nil {
		return err
	}
	t.kills.Add(1)
	return nil
}

const (
	// duplicated is the share of messages that are published again.
	duplicated = 0.12
	// duplicateDelayMax spreads the duplicates: some follow at once, others when their partition
	// has another owner.
	duplicateDelayMax = 4 * time.Second
	duplicateTick     = 100 * time.Millisecond
)

// duplicator publishes messages again, with their IDs and at other offsets, as a producer without
// idempotence or a failed-over cluster does. It reads the topic to find them.
type duplicator struct {
	client *kgo.Client
	random *rand.Rand
	seen   map[string]bool // message IDs
	queue  []delayed

	delivered, injected atomic.Int64
}

type delayed struct {
	due    time.Time
	record *kgo.Record
}

func newDuplicator(j job) (*duplicator, error) {
	client, err := kgo.NewClient(append(j.kafka(),
		kgo.ConsumeTopics(j.Run), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		// A copy belongs in the partition of its original, whatever chose that partition.
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
	)...)
	if err != nil {
		return nil, err
	}
	return &duplicator{client: client, random: newRandom(j.Seed, streamDuplicates), seen: make(map[string]bool)}, nil
}

// run works until ctx ends, or until finish is closed and everything queued up to that point is
// published.
func (d *duplicator) run(ctx context.Context, finish <-chan struct{}) error {
	defer d.client.Close()
	for {
		finishing := false
		select {
		case <-finish:
			finishing = true
		default:
		}
		poll, cancel := context.WithTimeout(ctx, duplicateTick)
		fetches := d.client.PollFetches(poll)
		cancel()
		if ctx.Err() != nil {
			return nil
		}
		fetches.EachRecord(d.look)
		if err := d.publish(ctx, finishing); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("publish duplicates: %w", err)
		}
		if finishing {
			return nil
		}
	}
}

// look remembers a message at its first occurrence, and draws whether to repeat it: never, once, or
// twice (the copy is due soon after).
func (d *duplicator) look(r *kgo.Record) {
	id := ""
	for _, h := range r.Headers {
		if h.Key == "message-id" {
			id = string(h.Value)
		}
	}
	if d.seen[id] {
		return
	}
	d.seen[id] = true
	d.delivered.Add(1)
	for d.random.Float64() < duplicated {
		twin := &kgo.Record{Topic: r.Topic, Partition: r.Partition, Key: r.Key, Value: r.Value, Headers: r.Headers}
		d.queue = append(d.queue, delayed{due: time.Now().Add(between(d.random, 0, duplicateDelayMax)), record: twin})
	}
}

// publish sends the messages that are due, or all.
func (d *duplicator) publish(ctx context.Context, everything bool) error {
	var due []*kgo.Record
	var later []delayed
	for _, q := range d.queue {
		if everything || time.Now().After(q.due) {
			due = append(due, q.record)
		} else {
			later = append(later, q)
		}
	}
	d.queue = later
	if len(due) == 0 {
		return nil
	}
	if err := d.client.ProduceSync(ctx, due...).FirstErr(); err != nil {
		return err
	}
	d.injected.Add(int64(len(due)))
	return nil
}

// The streams of randomness. Each is separate, so that the numbers of one do not depend on how
// often another was used.
const (
	streamFaults = iota + 1
	streamDuplicates
	streamOrders // and everything above: one stream for each attempt at each order
)

func newRandom(seed, stream uint64) *rand.Rand {
	return rand.New(rand.NewPCG(seed, stream)) //nolint:gosec // a run is to be repeatable, not secret
}
