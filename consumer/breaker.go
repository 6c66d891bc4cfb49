package consumer

import (
	"sync"
	"time"
)

// The share of failures is computed over the last breakerWindow messages of a partition. A failure
// counts for breakerAge: on a quiet partition an old outage must not pause messages that come
// months later.
const (
	breakerWindow = 100
	breakerAge    = 10 * time.Minute
)

// breaker prevents an outage of a service that the handler needs from parking a whole topic: it
// refuses to park when too many of the last messages were parked because they failed. The workers
// of a partition share it.
type breaker struct {
	shareMax float64

	mu      sync.Mutex
	handled int             // messages since the breaker was created
	failed  []brokenMessage // parked messages of the window, oldest first
}

type brokenMessage struct {
	number int // of the message
	at     time.Time
}

// allows reports whether one more message may be parked. A share of 1 never refuses, and one
// message may always be parked.
func (b *breaker) allows() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.forget()
	return b.shareMax >= 1 || float64(len(b.failed)+1) <= max(1, b.shareMax*breakerWindow)
}

// noteParked counts a message that is parked because it failed.
func (b *breaker) noteParked() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.handled++
	b.failed = append(b.failed, brokenMessage{b.handled, time.Now()})
	b.forget()
}

// noteHandled counts handled messages.
func (b *breaker) noteHandled(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.handled += n
	b.forget()
}

func (b *breaker) forget() {
	for len(b.failed) > 0 && (b.failed[0].number <= b.handled-breakerWindow || time.Since(b.failed[0].at) > breakerAge) {
		b.failed = b.failed[1:]
	}
}
