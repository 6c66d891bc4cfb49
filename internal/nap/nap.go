// Package nap sleeps for less than a millisecond. A timer of Go ends up as the timeout of epoll_wait, which counts
// milliseconds: in a process that does nothing else a pause of 0.1 ms takes a little more than one. On Linux a timerfd
// wakes epoll_wait to the microsecond. Elsewhere a nap is as long as a timer's.
package nap

import "time"

// Max is the longest nap: it cannot be interrupted.
const Max = time.Millisecond

// A Napper is for one goroutine. Its zero value takes naps by timer.
type Napper struct{ clock clock }

// New makes a Napper. Where the system gives none, it takes naps by timer.
func New() *Napper { return &Napper{newClock()} }

// Nap sleeps for d, at most Max.
func (n *Napper) Nap(d time.Duration) {
	if d = min(d, Max); d > 0 && !n.clock.sleep(d) {
		<-time.NewTimer(d).C
	}
}

// Close gives back what the system gave.
func (n *Napper) Close() { n.clock.close() }
