package watermillsink

import (
	"context"
	"fmt"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/effectonce/effectonce/relay"
)

// Sink hands rows to a publisher of Watermill. It is safe for concurrent use, also by several
// relays.
type Sink struct {
	publisher message.Publisher
	cfg       Config

	mu   sync.Mutex
	left []*call // abandoned calls: they outlived their context
}

var _ relay.Sink = (*Sink)(nil)

// New returns a sink, or all problems of its configuration at once. The caller keeps ownership of
// the publisher: close it after the relay's Run has returned.
func New(publisher message.Publisher, cfg Config) (*Sink, error) {
	cfg, err := cfg.withDefaults(publisher)
	if err != nil {
		return nil, err
	}
	return &Sink{publisher: publisher, cfg: cfg}, nil
}

// Publish hands messages to the publisher in their order: see relay.Sink. A failed call with
// several messages does not report which of them were accepted. So its messages are published
// again, one by one, up to the one that fails. Progress stops there, and that message is refused if
// its error is final.
func (s *Sink) Publish(ctx context.Context, messages []relay.Message) (accepted int, err error) {
	alone := 0 // publish one by one up to here
	for accepted < len(messages) {
		limit := s.cfg.Batch
		if accepted < alone {
			limit = 1
		}
		batch, err := s.batch(ctx, messages[accepted:], limit)
		if len(batch) == 0 {
			return accepted, relay.Refuse(err)
		}
		topic := messages[accepted].Topic
		switch err := s.call(ctx, topic, batch); {
		case err == nil:
			accepted += len(batch)
		case ctx.Err() != nil: // whatever the publisher returned, the message is not the cause
			return accepted, fmt.Errorf("publish to topic %q: %w", topic, err)
		case len(batch) > 1:
			alone = accepted + len(batch)
		case s.cfg.Final(err):
			return accepted, relay.Refuse(fmt.Errorf("publish to topic %q: %w", topic, err))
		default:
			return accepted, fmt.Errorf("publish to topic %q: %w", topic, err)
		}
	}
	return accepted, nil
}

// batch makes messages of the first rows, of one topic. The error is that of the next row, if it
// cannot be made into a message.
func (s *Sink) batch(ctx context.Context, rows []relay.Message, limit int) ([]*message.Message, error) {
	var made []*message.Message
	for i := range rows[:min(limit, len(rows))] {
		if rows[i].Topic != rows[0].Topic {
			break
		}
		m, err := s.message(ctx, &rows[i])
		if err != nil {
			return made, err
		}
		made = append(made, m)
	}
	return made, nil
}
