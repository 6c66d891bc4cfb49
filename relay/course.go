package relay

import "sync"

// course is where a worker may go. The member of the relay requests a rest and the worker confirms
// it, so that a tick that is taken while all workers rest is behind everything that they read: see
// reshard.go. All changes are made under one lock.
//
//	going ──rest──▶ asked ──(worker, between two batches, no read under way)──▶ resting ──endAt──▶ bound ──(worker)──▶ over
//	  ▲──────────────┴──────────────────────goOn───────────────────────────────────┘
type course struct {
	mu    sync.Mutex
	stage stage
	end   *tick
}

type stage int

const (
	going   stage = iota
	asked         // must rest as soon as the current batch is read
	resting       // nothing is read, and nothing will be before goOn or endAt
	bound         // works up to the tick end
	over          // everything up to the tick end is published, and the lease is kept
)

// rest requests a rest, and reports whether the worker rests.
func (c *course) rest() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stage == going {
		c.stage = asked
	}
	return c.stage == resting
}

// endAt lets a resting worker continue up to a tick.
func (c *course) endAt(end *tick) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stage == resting {
		c.stage, c.end = bound, end
	}
}

// goOn withdraws the request. A bound worker stays bound: it must be ended.
func (c *course) goOn() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stage == asked || c.stage == resting {
		c.stage = going
	}
}

// reading is called by the worker before it reads, when no read is under way. It returns false if
// the worker must rest, and the tick at which the next batch must end, if there is one. between:
// the last batch is complete.
func (c *course) reading(between bool) (ok bool, end *tick) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if between && c.stage == asked {
		c.stage = resting
	}
	return c.stage != resting, c.end
}

// arrive is called by the worker when all of its work is stored; at is where that work ends.
func (c *course) arrive(at cursor) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stage == bound && at.from == c.end && at.to == nil {
		c.stage = over
	}
}

func (c *course) isOver() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stage == over
}

// isBound reports whether the worker must end at a tick that other workers also end at.
func (c *course) isBound() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stage == bound || c.stage == over
}
