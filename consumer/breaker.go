package consumer

import (
	"sync"
	"time"
)

// The share of failures is taken over this many messages of a partition, and failures count for this long: on a quiet
// partition an old outage must not pause what comes months later.
const (
	breakerWindow = 100
	breakerAge    = 10 * time.Minute
)

// breaker keeps an outage of something that the handler needs from parking a whole topic: it refuses to park
// when too many of the last messages were parked for failing. The workers of a partition share it.
type breaker struct {
	shareMax float64
	now      func() time.Duration // monotonic

	mu      sync.Mutex
	handled int             // messages since the breaker was made
	failed  []brokenMessage // those of the window that were parked, the oldest first
}

type brokenMessage struct {
	number int // of the message
	at     time.Duration
}

func newBreaker(shareMax float64) *breaker {
	begun := time.Now()
	return &breaker{shareMax: shareMax, now: func() time.Duration { return time.Since(begun) }}
}

// allows reports whether one more message may be parked. A share of 1 never refuses, and one message may always be.
func (b *breaker) allows() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.forget()
	return b.shareMax >= 1 || float64(len(b.failed)+1) <= max(1, b.shareMax*breakerWindow)
}

// noteParked notes a message that is parked for failing.
func (b *breaker) noteParked() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.handled++
	b.failed = append(b.failed, brokenMessage{b.handled, b.now()})
	b.forget()
}

// noteHandled notes messages that were handled.
func (b *breaker) noteHandled(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.handled += n
	b.forget()
}

func (b *breaker) forget() {
	oldest := b.now() - breakerAge
	for len(b.failed) > 0 && (b.failed[0].number <= b.handled-breakerWindow || b.failed[0].at < oldest) {
		b.failed = b.failed[1:]
	}
}
