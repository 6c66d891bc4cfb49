package demo

import "math/rand/v2"

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
