package relay

import (
	"context"
	"sync"
	"time"
)

// dropsEvery is how often the log reports the number of rows that rules dropped.
const dropsEvery = 30 * time.Second

// drops counts the rows that rules drop.
type drops struct {
	mu     sync.Mutex
	topics map[string]*droppedTopic
}

type droppedTopic struct {
	rows int64 // since the last log line
	said time.Time
}

// dropped counts a row and logs it: the first row of its topic at once, then the number of rows
// since the last line.
func (r *Relay) dropped(ctx context.Context, topic string) {
	if r.cfg.Hooks.Dropped != nil {
		r.cfg.Hooks.Dropped(topic)
	}
	d := &r.drops
	d.mu.Lock()
	defer d.mu.Unlock()
	of := d.topics[topic]
	if of == nil {
		if d.topics == nil {
			d.topics = map[string]*droppedTopic{}
		}
		of = &droppedTopic{}
		d.topics[topic] = of
	}
	of.rows++
	if time.Since(of.said) < dropsEvery {
		return
	}
	r.cfg.Logger.InfoContext(ctx, "a rule drops rows: they are not published", "relay", r.cfg.Name, "topic", topic, "rows", of.rows)
	of.rows, of.said = 0, time.Now()
}
