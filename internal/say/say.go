// Package say keeps logs readable during an outage: what lasts is logged once, and then every 30 s with how often it came.
package say

import (
	"sync"
	"time"
)

// Every is how often something that lasts is logged after the first time.
const Every = 30 * time.Second

// Lines are what was said. The zero value is ready; it is safe for concurrent use.
type Lines struct {
	mu    sync.Mutex
	lines map[string]*line
}

type line struct {
	since, said, seen time.Time
	times             int
	lasts             bool
}

// Due notes that something came, and returns whether it is to be logged now, and how often it came since it began. What
// did not come for twice Every is over and begins again; with lasts only End ends it.
func (l *Lines) Due(key string, lasts bool) (times int, due bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	known := l.lines[key]
	if known == nil || !known.lasts && now.Sub(known.seen) > 2*Every {
		l.forget(now)
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

// linesMax bounds what is remembered. Beyond it what is over is forgotten.
const linesMax = 1000

func (l *Lines) forget(now time.Time) {
	if l.lines == nil {
		l.lines = map[string]*line{}
	}
	if len(l.lines) < linesMax {
		return
	}
	for key, known := range l.lines {
		if !known.lasts && now.Sub(known.seen) > 2*Every {
			delete(l.lines, key)
		}
	}
	if len(l.lines) >= linesMax {
		clear(l.lines) // each is logged once more, which is better than all for ever
	}
}

// Ended is something that lasted.
type Ended struct {
	Times  int
	Lasted time.Duration
}

// End notes that something is over, and returns what it was, or false if it never came.
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
