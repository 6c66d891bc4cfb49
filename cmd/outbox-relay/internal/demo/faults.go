package demo

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

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

// run returns when the plan is done or ctx ends, with every process resumed and started again.
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
	var healthy []*process
	all := t.fleet.of(f.role)
	for _, p := range all {
		if p.healthy() {
			healthy = append(healthy, p)
		}
	}
	switch {
	case len(healthy) == 0:
		return nil, 0
	case len(healthy) == 1 && len(all) > 1:
		return healthy[0], 0
	}
	return healthy[f.target%len(healthy)], f.freeze
}

// strike freezes or kills a process, and brings it back.
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
	p.wait(context.WithoutCancel(ctx))
	pause.For(ctx, restartPause)
	return p.start()
}
