// Package nap sleeps for less than a millisecond. A Go timer ends up as the timeout of epoll_wait,
// which counts milliseconds: in an otherwise idle process a pause of 0.1 ms takes a little more
// than one millisecond. On Linux a timerfd wakes epoll_wait to the microsecond. Elsewhere a nap
// takes as long as a timer.
package nap

import "time"

// Max is the longest nap: it cannot be interrupted.
const Max = time.Millisecond

// Napper sleeps. It is for one goroutine. Its zero value uses a timer.
type Napper struct{ clock clock }

// New returns a Napper. If the system provides no timerfd, it uses a timer.
func New() *Napper { return &Napper{newClock()} }

// Nap sleeps for d, at most Max.
func (n *Napper) Nap(d time.Duration) {
	if d = min(d, Max); d > 0 && !n.clock.sleep(d) {
		<-time.NewTimer(d).C
	}
}

// Close releases the system's resources.
func (n *Napper) Close() { n.clock.close() }
