package bench

import (
	"errors"
	"slices"
	"sync"
	"time"
)

// meter measures the rate between the first commit of a run and its last. The messages of the first
// commit do not count, because their duration is unknown: it includes connecting, joining the group
// and preparing statements.
type meter struct {
	want int

	mu          sync.Mutex
	first, last time.Time
	skipped     int
	done        int
}

// add counts messages that were just committed and reports whether all are done.
func (m *meter) add(n int) bool {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.done == 0 {
		m.first, m.skipped = now, n
	}
	m.done, m.last = m.done+n, now
	return m.done >= m.want
}

var errTooFew = errors.New("everything was handled in one transaction: nothing to measure, take more messages")

// rate in messages a second.
func (m *meter) rate() (float64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	elapsed := m.last.Sub(m.first)
	if m.done == m.skipped || elapsed <= 0 {
		return 0, errTooFew
	}
	return float64(m.done-m.skipped) / elapsed.Seconds(), nil
}

// samples are the figures of the rounds, by key.
type samples map[string][]float64

func (s samples) add(key string, value float64) { s[key] = append(s[key], value) }

// percentile returns the value below which a share of the values is, and between two values their
// mean.
func percentile(values []float64, share float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	place := share * float64(len(sorted)-1)
	below := int(place)
	if below+1 >= len(sorted) {
		return sorted[len(sorted)-1]
	}
	return sorted[below] + (place-float64(below))*(sorted[below+1]-sorted[below])
}
