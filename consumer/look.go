package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
)

// lookEvery is how often a session compares its partitions with the ends of their topics.
const lookEvery = time.Minute

// errStuck asks for a new session: the broker has records that the client does not return.
var errStuck = errors.New("records exist in the topic but do not arrive: rejoining the group")

// lookAfter stores which partitions are at their end, so that idle ones do not delay the removal of
// claims. It also detects a stuck client, and logs halted partitions again.
func (s *session) lookAfter(ctx context.Context) {
	ticker := time.NewTicker(s.consumer.lookEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		s.mu.Lock()
		for key, a := range s.assignments {
			if a.state == StateHalted {
				s.engine.cfg.Logger.ErrorContext(ctx, "partition still halts", "group", s.engine.cfg.Group, "topic", key.topic, "partition", key.partition, "error", a.err)
			}
		}
		s.mu.Unlock()
		if err := s.storeEnds(ctx); err != nil && ctx.Err() == nil {
			s.engine.cfg.Logger.WarnContext(ctx, "could not compare partitions with their topics; will retry", "group", s.engine.cfg.Group, "error", err)
		}
	}
}

func (s *session) storeEnds(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, takeOverMax)
	defer cancel()
	s.mu.Lock()
	partitions := make([]*partition, 0, len(s.partitions))
	for _, p := range s.partitions {
		partitions = append(partitions, p)
	}
	s.mu.Unlock()
	if len(partitions) == 0 {
		return nil
	}
	var now time.Time // read before the ends: later records are not covered
	if err := s.engine.pool.QueryRow(ctx, clockSQL).Scan(&now); err != nil {
		return fmt.Errorf("ask for the time: %w", err)
	}
	// Committed offsets: records that an open transaction holds back are not missing.
	ends, err := kadm.NewClient(s.client).ListCommittedOffsets(ctx, s.engine.cfg.Topics...)
	if err != nil {
		return fmt.Errorf("ask Kafka for the ends of partitions: %w", err)
	}
	var topics []string
	var numbers []int32
	var epochs, delivered []int64
	for _, p := range partitions {
		end, ok := ends.Lookup(p.pos.topic, p.pos.partition)
		if !ok || end.Err != nil {
			continue
		}
		s.sawEnd(topicPartition{p.pos.topic, p.pos.partition}, end.Offset)
		atEnd, stuck, upTo := p.compare(end.Offset)
		if stuck {
			s.restart(fmt.Errorf("%s/%d: %w", p.pos.topic, p.pos.partition, errStuck))
			return nil
		}
		if atEnd {
			topics, numbers = append(topics, p.pos.topic), append(numbers, p.pos.partition)
			epochs, delivered = append(epochs, p.current.Load().epoch), append(delivered, upTo)
		}
	}
	if len(topics) == 0 {
		return nil
	}
	if _, err := s.engine.pool.Exec(ctx, s.engine.sql.caughtUp, s.engine.cfg.Group, topics, numbers, epochs, now, delivered); err != nil {
		return fmt.Errorf("store that partitions are at their end: %w", err)
	}
	return nil
}

// sawEnd stores the end of a partition, for its lag.
func (s *session) sawEnd(key topicPartition, end int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a := s.assignments[key]; a != nil {
		a.end = end
	}
}
