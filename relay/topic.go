package relay

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/effectonce/effectonce/outbox"
)

// errTopicPanicked ends Run: the row must be neither lost nor passed.
var errTopicPanicked = errors.New("Config.Topic panicked")

// destination is where a row goes.
type destination struct {
	topic string // in Kafka
	none  bool   // Config.Topic does not publish the row
}

// destinations returns where rows go.
func (p *publisher) destinations(ctx context.Context, rows []row) ([]destination, error) {
	all := make([]destination, len(rows))
	for i := range rows {
		switch r := &rows[i]; {
		case p.cfg.Topic != nil:
			var err error
			if all[i], err = p.chosen(ctx, r); err != nil {
				return nil, err
			}
		case i > 0 && rows[i-1].topic == r.topic:
			all[i] = all[i-1]
		default:
			all[i].topic = p.cfg.TopicPrefix + r.topic
		}
	}
	return all, nil
}

// chosen asks Config.Topic where a row goes.
func (p *publisher) chosen(ctx context.Context, r *row) (to destination, err error) {
	headers, err := outbox.DecodeHeaders(r.headers)
	if err != nil {
		return destination{topic: p.cfg.TopicPrefix + r.topic}, nil // the row is dead for its headers
	}
	defer func() {
		if cause := recover(); cause != nil {
			p.cfg.Logger.ErrorContext(ctx, "Config.Topic panicked", "relay", p.cfg.Name, "seq", r.seq, "id", r.id, "panic", cause, "stack", string(debug.Stack()))
			err = fmt.Errorf("%w on the row with seq %d, id %s, topic %q: %v", errTopicPanicked, r.seq, r.id, r.topic, cause)
		}
	}()
	topic, ok := p.cfg.Topic(Message{ID: r.id, Topic: r.topic, Key: r.key, Payload: r.payload, Headers: headers})
	return destination{p.cfg.TopicPrefix + topic, !ok}, nil
}

// waitingFor returns the topics in Kafka that rows of a topic in the outbox are known to wait for.
func (p *publisher) waitingFor(topic string) []string {
	if p.cfg.Topic == nil {
		return []string{p.cfg.TopicPrefix + topic}
	}
	return p.topics.blockedOn(topic)
}
