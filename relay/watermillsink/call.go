package watermillsink

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/ThreeDotsLabs/watermill/message"
)

// call is one call of the publisher.
type call struct {
	ended chan struct{}
	err   error // valid once ended
}

var errUnfinished = errors.New("the publisher ended its goroutine instead of returning")

// call publishes, and returns at the end of ctx at the latest. Publishers take no context: a call
// that ignores the context of its messages continues after call returned, while the relay hands the
// same messages over again. Both go through the messages from the same place in order, so this adds
// duplicates and changes no order of first occurrences. But each attempt would leave another
// goroutine behind. So no call begins while an abandoned one is running: there are never more of
// them than concurrent calls, which is one for each shard.
func (s *Sink) call(ctx context.Context, topic string, messages []*message.Message) error {
	if err := s.waitForLeft(ctx); err != nil {
		return err
	}
	c := &call{ended: make(chan struct{}), err: errUnfinished}
	go func() {
		defer close(c.ended)
		c.err = s.publisher.Publish(topic, messages...)
	}()
	select {
	case <-c.ended:
		return c.err
	case <-ctx.Done():
		s.leave(c)
		return fmt.Errorf("the publisher did not return in time; its call continues: %w", ctx.Err())
	}
}

func (s *Sink) leave(c *call) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left = append(s.left, c)
}

// waitForLeft waits until no abandoned call is running.
func (s *Sink) waitForLeft(ctx context.Context) error {
	for ctx.Err() == nil {
		c := s.oldestLeft()
		if c == nil {
			return nil
		}
		select {
		case <-c.ended:
		case <-ctx.Done():
			return fmt.Errorf("an earlier call of the publisher has still not returned: %w", ctx.Err())
		}
	}
	return ctx.Err()
}

// oldestLeft returns the oldest abandoned call, or nil if all have ended.
func (s *Sink) oldestLeft() *call {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left = slices.DeleteFunc(s.left, func(c *call) bool {
		select {
		case <-c.ended:
			return true
		default:
			return false
		}
	})
	if len(s.left) == 0 {
		return nil
	}
	return s.left[0]
}
