package consumer

import "sync"

// breakerWindow is how many messages of a partition the share of failures is taken over.
const breakerWindow = 100

// breaker keeps an outage of something that the handler needs from parking a whole topic: it refuses to park
// when too many of the last messages were parked for failing. The workers of a partition share it.
type breaker struct {
	shareMax float64

	mu    sync.Mutex
	last  [breakerWindow]bool // whether it was parked
	at    int
	count int
}

// allows tells whether one more message may be parked.
func (b *breaker) allows() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return float64(b.count+1) <= max(1, b.shareMax*breakerWindow)
}

// parked notes a message that is parked for failing.
func (b *breaker) parked() { b.note(true, 1) }

// handled notes messages that were handled.
func (b *breaker) handled(n int) { b.note(false, min(n, breakerWindow)) }

func (b *breaker) note(parked bool, times int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !parked && b.count == 0 {
		return
	}
	for range times {
		if b.last[b.at] {
			b.count--
		}
		if b.last[b.at] = parked; parked {
			b.count++
		}
		b.at = (b.at + 1) % breakerWindow
	}
}
