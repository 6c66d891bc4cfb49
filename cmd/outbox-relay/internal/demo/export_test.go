package demo

import (
	"context"
	"errors"
	"time"
)

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

// SetUpAndTearDown makes what a run of a name needs, and removes what it made.
func SetUpAndTearDown(ctx context.Context, databaseURL string, brokers []string, name string) error {
	j := job{DatabaseURL: databaseURL, Brokers: brokers, Schema: name, Topic: name, Group: name}
	var m made
	err := setUp(ctx, j, &m)
	return errors.Join(err, tearDown(ctx, j, m))
}
