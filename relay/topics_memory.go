package relay

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/effectonce/effectonce/internal/record"
)

// topicMemory is what a relay keeps about topics from one client to the next: a new client is made
// whenever the work starts over.
type topicMemory struct {
	uncompressed atomic.Bool // brokers refused compressed batches

	mu      sync.Mutex
	limits  map[string]*limitMemory
	refused map[string]time.Time // topics that the relay may not write to, and since when
	waiting map[string]time.Time // topics that the relay may not use, and since when; logged
	// touched is set when a value changed that a client may have been given before. It is never
	// cleared: a limit rarely changes, and the check that it costs is short.
	touched bool
}

// limitMemory is about max.message.bytes of one topic.
type limitMemory struct {
	bytes int32 // the last answer; 0: there was none
	// widened is the size of the largest record that was met while the limit was not known: batches
	// may be that large. Not larger: if that record is accepted, so is a batch of others that is
	// not larger.
	widened int32
}

// writeRetryEvery is how often writing is tried to a topic that brokers refused to write to, although
// they do not report that in the topic's rights.
const writeRetryEvery = 10 * time.Second

func (m *topicMemory) limit(name string) *limitMemory {
	l := m.limits[name]
	if l == nil {
		if m.limits == nil {
			m.limits = map[string]*limitMemory{}
		}
		l = &limitMemory{}
		m.limits[name] = l
	}
	return l
}

// learned stores an answer about a limit. It returns the last known limit, and how long that is
// valid.
func (m *topicMemory) learned(name string, answer record.Limit) (maxBytes int32, fresh time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.limit(name)
	fresh = topicMaxAge
	switch {
	case answer.Err == nil:
		m.touched = m.touched || l.bytes != answer.Bytes
		l.bytes = answer.Bytes
	case !answer.Withheld():
		fresh = limitRetry
	}
	return l.bytes, fresh
}

// widen lets batches be as large as a record whose topic has no known limit.
func (m *topicMemory) widen(name string, bytes int32) {
	if bytes <= record.BytesDefault {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if l := m.limit(name); bytes > l.widened {
		l.widened, m.touched = bytes, true
	}
}

// narrow undoes widen: Kafka refused the record, and would refuse batches of that size.
func (m *topicMemory) narrow(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if l := m.limit(name); l.widened > 0 {
		l.widened, m.touched = 0, true
	}
}

func (m *topicMemory) changed() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.touched
}

func (m *topicMemory) batchBytes(name string) int32 {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.limits[name]
	switch {
	case l == nil:
		return record.BytesDefault
	case l.bytes > 0:
		return l.bytes
	}
	return max(record.BytesDefault, l.widened)
}

// refuse notes that brokers refused to let the relay write to a topic.
func (m *topicMemory) refuse(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.refused == nil {
		m.refused = map[string]time.Time{}
	}
	m.refused[name] = time.Now()
}

func (m *topicMemory) refusedLately(name string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	at, refused := m.refused[name]
	return refused && time.Since(at) < writeRetryEvery
}

// tell logs once that the relay may not use a topic, and once that it may again.
func (m *topicMemory) tell(ctx context.Context, logger *slog.Logger, relay, name string, s topicState) {
	m.mu.Lock()
	defer m.mu.Unlock()
	since, waits := m.waiting[name]
	switch {
	case s.reason == ReasonNotAuthorized && !waits:
		if m.waiting == nil {
			m.waiting = map[string]time.Time{}
		}
		m.waiting[name] = time.Now()
		logger.ErrorContext(ctx, "Kafka does not let the relay use a topic: its rows wait in outbox_dead and are published automatically when the right is granted",
			"relay", relay, "topic", name, "error", s.err)
	case s.reason != ReasonNotAuthorized && waits:
		delete(m.waiting, name)
		if s.reason == "" {
			logger.InfoContext(ctx, "Kafka lets the relay use the topic again", "relay", relay, "topic", name, "after", time.Since(since).Round(time.Millisecond))
		}
	}
}
