package idempotency

import "context"

const ReapSQL = reapSQL

// ReapAndLog is one run of the loop that forgets keys.
func (o *Operation) ReapAndLog(ctx context.Context) error { return o.reap(ctx) }

// Waiting is how many requests wait for a key of this operation, and how many keys are asked for.
func (o *Operation) Waiting() (requests, keys int) {
	o.gate.Lock()
	defer o.gate.Unlock()
	for _, l := range o.gate.lines {
		requests += l.waiting
	}
	return requests, len(o.gate.lines)
}
