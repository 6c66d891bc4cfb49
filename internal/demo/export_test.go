package demo

import "time"

// Fault is a fault for tests.
type Fault struct {
	At, Freeze time.Duration
	Role       string
}

// Plan draws the faults of a seed.
func Plan(seed uint64, duration, session time.Duration) (faults []Fault) {
	for _, f := range plan(newRandom(seed, streamFaults), duration, session) {
		faults = append(faults, Fault{f.at, f.freeze, string(f.role)})
	}
	return faults
}
