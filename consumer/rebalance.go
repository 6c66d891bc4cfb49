package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// assigned is called by the client between the assignment of partitions and their first fetch. It takes
// their positions over and answers where to resume: at the smaller of Kafka's committed offset and the
// database's position. Kafka's may be ahead (a failover of the database lost the last commits) or
// behind (it is advisory, or an operator rewound it); neither loses a message, and the claims drop what
// comes twice.
//
// ctx ends when the assignment does. While the database or the brokers are away the assignment waits.
func (s *session) assigned(ctx context.Context, offsets map[string]map[int32]kgo.Offset) (map[string]map[int32]kgo.Offset, error) {
	select {
	case <-s.ready:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	for attempt := 1; ; attempt++ {
		limited, cancel := context.WithTimeout(ctx, takeOverMax)
		resumed, err := s.takeOver(limited, offsets)
		cancel()
		if err == nil {
			return resumed, nil
		}
		if ctx.Err() != nil {
			return nil, err
		}
		wait := s.backoff(attempt)
		s.cfg.Logger.WarnContext(ctx, "positions could not be taken over; the partitions wait", "group", s.cfg.Group, "error", err, "retry_in", wait)
		pause(ctx, wait)
	}
}

// takeOverMax bounds one attempt, so that a request that hangs is given up and said.
const takeOverMax = 15 * time.Second

func (s *session) takeOver(ctx context.Context, offsets map[string]map[int32]kgo.Offset) (map[string]map[int32]kgo.Offset, error) {
	holds, err := s.holds(ctx, offsets)
	if err != nil || len(holds) == 0 {
		return offsets, err
	}
	held, err := s.hold(ctx, holds)
	if err != nil {
		return nil, err
	}
	resumed := map[string]map[int32]kgo.Offset{}
	for i, h := range holds {
		pos := held[i]
		at := h.committed
		if pos.stored != nil && (at < 0 || *pos.stored < at) {
			at = *pos.stored
		}
		if resumed[h.topic] == nil {
			resumed[h.topic] = map[int32]kgo.Offset{}
		}
		offset := kgo.NewOffset().AtStart()
		if at >= 0 {
			// Without the leader epoch: the client would look for truncation against an epoch that
			// belongs to another offset.
			offset = kgo.NewOffset().At(at)
		}
		resumed[h.topic][h.partition] = offset
		s.begin(ctx, pos, h.topicID)
		s.cfg.Logger.InfoContext(ctx, "partition assigned", "group", s.cfg.Group, "topic", h.topic, "partition", h.partition,
			"epoch", pos.epoch, "position", pos.stored, "committed", h.committed, "resume", at)
	}
	return resumed, nil
}

// begin starts the worker of a partition, after one that may be left from an earlier assignment.
func (s *session) begin(ctx context.Context, pos *position, topicID uuid.UUID) {
	key := topicPartition{pos.topic, pos.partition}
	s.stop(ctx, s.take(map[string][]int32{pos.topic: {pos.partition}}), 0)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return
	}
	p := newPartition(s, pos, topicID)
	s.partitions[key] = p
	s.client.ResumeFetchPartitions(map[string][]int32{pos.topic: {pos.partition}})
	go p.run()
}

// holds lists what is to be taken over, with what Kafka knows: the committed offset and the topic's ID.
func (s *session) holds(ctx context.Context, offsets map[string]map[int32]kgo.Offset) ([]hold, error) {
	if len(offsets) == 0 {
		return nil, nil
	}
	var names []string
	for topic := range offsets {
		names = append(names, topic)
	}
	admin := kadm.NewClient(s.client)
	details, err := admin.ListTopics(ctx, names...)
	if err != nil {
		return nil, fmt.Errorf("ask Kafka for topic IDs: %w", err)
	}
	var ends kadm.ListedOffsets
	if s.cfg.Start == Latest {
		if ends, err = admin.ListEndOffsets(ctx, names...); err != nil {
			return nil, fmt.Errorf("ask Kafka for the ends of partitions: %w", err)
		}
	}
	var holds []hold
	for topic, numbers := range offsets {
		if err := details[topic].Err; err != nil {
			return nil, fmt.Errorf("ask Kafka for the ID of topic %q: %w", topic, err)
		}
		for number, offset := range numbers {
			h := hold{topic: topic, partition: number, committed: offset.EpochOffset().Offset, topicID: uuid.UUID(details[topic].ID)}
			if end, ok := ends.Lookup(topic, number); ok && h.committed < 0 {
				if end.Err != nil {
					return nil, fmt.Errorf("ask Kafka for the end of %s/%d: %w", topic, number, end.Err)
				}
				h.start = &end.Offset
			}
			holds = append(holds, h)
		}
	}
	slices.SortFunc(holds, hold.compare)
	return holds, nil
}

// revoked waits, bounded, until the partitions have finished or rolled back their batch, and commits
// the offsets, before another member gets them.
func (s *session) revoked(ctx context.Context, _ *kgo.Client, keys map[string][]int32) {
	if len(keys) == 0 {
		return
	}
	s.stop(ctx, s.take(keys), s.cfg.DrainMax)
	s.commitMarks(ctx)
}

// lost stops at once: somebody else holds the partitions already. What is committed late anyway is
// found by their claims, and the epoch of the position refuses the rest.
func (s *session) lost(ctx context.Context, _ *kgo.Client, keys map[string][]int32) {
	if len(keys) == 0 {
		return
	}
	s.cfg.Logger.WarnContext(ctx, "partitions were lost: this consumer was away for longer than its session", "group", s.cfg.Group, "partitions", keys)
	s.stop(ctx, s.take(keys), 0)
}

// rehold takes one partition over again after its position was fenced. It fails with errWentBack if the
// database is behind what this consumer committed.
func (s *session) rehold(ctx context.Context, p *partition) error {
	h := hold{topic: p.pos.topic, partition: p.pos.partition, topicID: p.topicID, committed: -1}
	held, err := s.hold(ctx, []hold{h})
	if err != nil {
		return err
	}
	known := p.pos.stored
	*p.pos = *held[0]
	if known != nil && (p.pos.stored == nil || *p.pos.stored < *known) {
		return errWentBack
	}
	return nil
}

var errWentBack = errors.New("the database went back behind what was committed (a failover?): resuming at its position")
