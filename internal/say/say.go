// Package say keeps logs readable during an outage. A lasting condition is logged once, and then
// every 30 s with its number of occurrences.
package say

import (
	"sync"
	"time"
)

// Every is how often a lasting condition is logged after the first time.
const Every = 30 * time.Second

// linesMax bounds how many conditions are remembered.
const linesMax = 1000

// Lines are the conditions that were logged. The zero value is ready; it is safe for concurrent
// use.
type Lines struct {
	mu    sync.Mutex
	lines map[string]*line
}

type line struct {
	since, said, seen time.Time
	times             int
	lasts             bool
}

// Due records an occurrence. It returns whether to log it now, and the number of occurrences since
// the condition began. A condition that does not occur for twice Every has ended, and begins again;
// with lasts only End ends it.
func (l *Lines) Due(key string, lasts bool) (times int, due bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	known := l.lines[key]
	if known == nil || !known.lasts && now.Sub(known.seen) > 2*Every {
		if l.lines == nil || len(l.lines) >= linesMax {
			l.lines = map[string]*line{} // each is logged once more
		}
		known = &line{since: now, lasts: lasts}
		l.lines[key] = known
	}
	known.seen = now
	known.times++
	if known.times > 1 && now.Sub(known.said) < Every {
		return known.times, false
	}
	known.said = now
	return known.times, true
}

// Ended is a condition that ended.
type Ended struct {
	Times  int
	Lasted time.Duration
}

// End ends a condition. It returns what it was, or false if it never occurred.
func (l *Lines) End(key string) (Ended, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	known := l.lines[key]
	if known == nil {
		return Ended{}, false
	}
	delete(l.lines, key)
	return Ended{known.times, time.Since(known.since)}, true
}
