package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/bounds"
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
		wait := s.consumer.engine.backoff(attempt)
		s.consumer.engine.cfg.Logger.WarnContext(ctx, "positions could not be taken over; the partitions wait", "group", s.consumer.engine.cfg.Group, "error", err, "retry_in", wait)
		pause(ctx, wait)
	}
}

// takeOverMax bounds one attempt, so that a request that hangs is given up and said.
const takeOverMax = 15 * time.Second

func (s *session) takeOver(ctx context.Context, offsets map[string]map[int32]kgo.Offset) (map[string]map[int32]kgo.Offset, error) {
	s.mu.Lock()
	closing := s.closing
	s.mu.Unlock()
	if closing {
		return offsets, nil // nothing begins any more: the next holder should not take it for a crash
	}
	holds, err := s.holds(ctx, offsets)
	if err != nil || len(holds) == 0 {
		return offsets, err
	}
	held, err := s.consumer.hold(ctx, holds)
	if err != nil {
		return nil, err
	}
	resumed := map[string]map[int32]kgo.Offset{}
	for i, h := range holds {
		pos := held[i]
		at, err := s.resume(ctx, h, pos)
		if err != nil {
			return nil, err
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
		s.consumer.engine.cfg.Logger.InfoContext(ctx, "partition assigned", "group", s.consumer.engine.cfg.Group, "topic", h.topic, "partition", h.partition,
			"epoch", pos.epoch, "position", pos.stored, "committed", h.committed, "resume", at)
	}
	return resumed, nil
}

// resume says where a partition goes on, and starts its worker, unless it has to halt.
func (s *session) resume(ctx context.Context, h hold, pos *position) (int64, error) {
	at := h.committed
	if pos.stored != nil && (at < 0 || *pos.stored < at) {
		at = *pos.stored
	}
	if pos.stored != nil && *pos.stored >= h.first {
		at = max(at, h.first) // Kafka's offset is older than the topic, the position is not
	}
	if problem := h.outOfRange(at, pos.stored); problem != nil {
		if s.consumer.engine.cfg.OutOfRange == OutOfRangeHalt {
			return h.first, s.halt(ctx, pos, problem)
		}
		s.consumer.engine.cfg.Logger.ErrorContext(ctx, "going on at the earliest record that is left", "group", s.consumer.engine.cfg.Group, "topic", h.topic, "partition", h.partition,
			"error", problem, "resume", h.first)
		if err := s.reset(ctx, pos, h.first, problem); err != nil {
			return 0, err
		}
		at = h.first
	}
	s.begin(ctx, pos, h, at)
	return at, nil
}

// outOfRange tells whether records between what was consumed and what is left in the topic are missing.
func (h hold) outOfRange(at int64, stored *int64) error {
	switch {
	case at >= 0 && at < h.first:
		return fmt.Errorf("records %d to %d of %s/%d were deleted before they were consumed", at, h.first-1, h.topic, h.partition)
	case at > h.end || stored != nil && *stored > h.end:
		if stored != nil {
			at = max(at, *stored)
		}
		return fmt.Errorf("%s/%d ends at offset %d, but was consumed up to %d: Kafka lost its end (an unclean election?)", h.topic, h.partition, h.end, at)
	}
	return nil
}

// halt leaves a partition alone until an operator decides.
func (s *session) halt(ctx context.Context, pos *position, problem error) error {
	said := fmt.Errorf("the partition halts: %w. To go on with what is left, set Config.OutOfRange to OutOfRangeResumeEarliest and restart", problem)
	if _, err := s.consumer.engine.pool.Exec(ctx, s.consumer.engine.sql.trouble, s.consumer.engine.cfg.Group, pos.topic, pos.partition, pos.epoch, bounds.ErrorText(said)); err != nil {
		return fmt.Errorf("store why a partition halts: %w", err)
	}
	s.client.PauseFetchPartitions(map[string][]int32{pos.topic: {pos.partition}})
	s.mu.Lock()
	s.halted[topicPartition{pos.topic, pos.partition}] = said
	s.mu.Unlock()
	s.consumer.engine.cfg.Logger.ErrorContext(ctx, "partition halts", "group", s.consumer.engine.cfg.Group, "topic", pos.topic, "partition", pos.partition, "error", said)
	return nil
}

// reset moves the stored position to what is left of the topic, and leaves a note about it.
func (s *session) reset(ctx context.Context, pos *position, to int64, why error) error {
	if _, err := s.consumer.engine.pool.Exec(ctx, s.consumer.engine.sql.reset, s.consumer.engine.cfg.Group, pos.topic, pos.partition, pos.epoch, to, s.consumer.owner, bounds.ErrorText(why)); err != nil {
		return fmt.Errorf("reset the position of %s/%d: %w", pos.topic, pos.partition, err)
	}
	pos.stored = &to
	return nil
}

// begin starts the worker of a partition, after one that may be left from an earlier assignment.
func (s *session) begin(ctx context.Context, pos *position, h hold, at int64) {
	s.end(ctx, s.take(map[string][]int32{pos.topic: {pos.partition}}), 0)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return
	}
	p := newPartition(s, pos, h.topicID) //nolint:contextcheck // it outlives the assignment
	p.queue.start(max(at, h.first))
	s.partitions[topicPartition{pos.topic, pos.partition}] = p
	s.client.ResumeFetchPartitions(map[string][]int32{pos.topic: {pos.partition}})
	go p.run() //nolint:contextcheck // as above
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
	starts, err := admin.ListStartOffsets(ctx, names...)
	if err != nil {
		return nil, fmt.Errorf("ask Kafka for the starts of partitions: %w", err)
	}
	ends, err := admin.ListEndOffsets(ctx, names...)
	if err != nil {
		return nil, fmt.Errorf("ask Kafka for the ends of partitions: %w", err)
	}
	var holds []hold
	for topic, numbers := range offsets {
		if err := details[topic].Err; err != nil {
			return nil, fmt.Errorf("ask Kafka for the ID of topic %q: %w", topic, err)
		}
		for number, offset := range numbers {
			h := hold{topic: topic, partition: number, committed: offset.EpochOffset().Offset, topicID: uuid.UUID(details[topic].ID)}
			first, begins := starts.Lookup(topic, number)
			end, ends := ends.Lookup(topic, number)
			if err := errors.Join(first.Err, end.Err); err != nil || !begins || !ends {
				return nil, fmt.Errorf("ask Kafka where %s/%d begins and ends: %w", topic, number, cmp.Or(err, errNoAnswer))
			}
			h.first, h.end = first.Offset, end.Offset
			if s.consumer.engine.cfg.Start == StartLatest && h.committed < 0 {
				h.start = &h.end
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
	s.giveBack(ctx, keys)
}

// lost stops at once: somebody else holds the partitions already. What is committed late anyway is
// found by their claims, and the epoch of the position refuses the rest.
func (s *session) lost(ctx context.Context, _ *kgo.Client, keys map[string][]int32) {
	if len(keys) == 0 {
		return
	}
	s.consumer.engine.cfg.Logger.WarnContext(ctx, "partitions were lost: this consumer was away for longer than its session", "group", s.consumer.engine.cfg.Group, "partitions", keys)
	s.stop(ctx, s.take(keys), 0)
}

// rehold takes one partition over again after its position was fenced. It fails with errWentBack if the
// database is behind what this consumer committed.
func (s *session) rehold(ctx context.Context, p *partition) error {
	h := hold{topic: p.pos.topic, partition: p.pos.partition, topicID: p.topicID, committed: -1}
	held, err := s.consumer.hold(ctx, []hold{h})
	if err != nil {
		return err
	}
	known := p.pos.stored
	p.pos.epoch, p.pos.stored, p.pos.stuck = held[0].epoch, held[0].stored, held[0].stuck
	p.publish()
	if known != nil && (p.pos.stored == nil || *p.pos.stored < *known) {
		return errWentBack
	}
	return nil
}

var errNoAnswer = errors.New("no answer about the partition")

var errWentBack = errors.New("the database went back behind what was committed (a failover?): resuming at its position")
