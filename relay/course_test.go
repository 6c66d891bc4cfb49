package relay_test

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/relay"
)

// Property: a worker that confirmed that it rests, and then may continue, must confirm anew: an
// earlier confirmation does not count while it reads.
func TestOldConfirmationDoesNotCount(t *testing.T) {
	t.Parallel()
	var c relay.Course
	require.True(t, c.MayRead(true))
	require.False(t, c.Rest(), "a read is under way")
	require.True(t, c.MayRead(false), "the batch under way is read to its end")
	require.False(t, c.Rest())
	require.False(t, c.MayRead(true), "it rests between two batches")
	require.True(t, c.Rest())
	c.GoOn()
	require.True(t, c.MayRead(true))
	require.False(t, c.Rest(), "it reads: what it confirmed before is over")
}

// Property: while the member finds that a worker rests, no read is under way, however the two
// interleave. Row O5 of guarantees.md.
func TestNothingIsReadWhileAWorkerRests(t *testing.T) {
	t.Parallel()
	var c relay.Course
	var reads, done atomic.Bool
	var rounds atomic.Int64
	var group sync.WaitGroup
	group.Go(func() {
		for !done.Load() {
			if c.MayRead(true) {
				reads.Store(true)
				runtime.Gosched()
				reads.Store(false)
				rounds.Add(1)
			}
			runtime.Gosched()
		}
	})
	for rested := 0; rested < 5000; runtime.Gosched() {
		if !c.Rest() {
			continue
		}
		rested++
		for range 3 {
			require.False(t, reads.Load())
			runtime.Gosched()
		}
		c.GoOn()
	}
	done.Store(true)
	group.Wait()
	require.Positive(t, rounds.Load(), "the test's own premise")
}
