package consumer

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// committedOffset is the group's offset in Kafka.
type committedOffset struct {
	offset   int64
	metadata string
}

// commitOrigin is who committed an offset.
type commitOrigin uint8

const (
	commitNone    commitOrigin = iota // nothing is committed
	commitOurs                        // a consumer of this library, for this topic
	commitStale                       // the same, for an earlier topic of this name in this cluster
	commitMoved                       // the same, and another program changed the offset afterwards
	commitRewind                      // a consumer of this library that has not finished a rewind
	commitForeign                     // another program, or a mirror of another cluster
)

func (o commitOrigin) String() string {
	switch o {
	case commitNone:
		return "none"
	case commitOurs:
		return "committed by this consumer"
	case commitStale:
		return "of an earlier topic"
	case commitMoved:
		return "moved by another program"
	case commitRewind:
		return "an earlier rewind that is not finished"
	default:
		return "committed by another program"
	}
}

// The metadata of a commit names the log that it belongs to. Otherwise an offset of a topic that
// was deleted and recreated, or one that a mirror translated for another cluster, would look like
// an offset of this log. The metadata also records that the offset is behind the position because
// of a rewind: messages after it must still be handled.
const commitVersion = "effectonce/1"

// commitMetadata is the inverse of parseCommit. rewind is where an unfinished rewind began; -1:
// none.
func commitMetadata(cluster string, topicID uuid.UUID, offset, rewind int64) string {
	text := fmt.Sprintf("%s cluster=%s topic=%s offset=%d", commitVersion, cluster, topicID, offset)
	if rewind >= 0 {
		text += fmt.Sprintf(" rewind=%d", rewind)
	}
	return text
}

// parsedCommit is the metadata of a commit by this library.
type parsedCommit struct {
	cluster string
	topicID uuid.UUID
	offset  int64
	rewind  int64 // where an unfinished rewind began; -1: none
}

func parseCommit(metadata string) (c parsedCommit, ok bool) {
	fields := strings.Fields(metadata)
	if len(fields) == 0 || fields[0] != commitVersion {
		return c, false
	}
	c.offset, c.rewind = -1, -1
	var problems error
	for _, field := range fields[1:] {
		var err error
		switch name, value, _ := strings.Cut(field, "="); name {
		case "cluster":
			c.cluster = value
		case "topic":
			c.topicID, err = uuid.Parse(value)
		case "offset":
			c.offset, err = strconv.ParseInt(value, 10, 64)
		case "rewind":
			c.rewind, err = strconv.ParseInt(value, 10, 64)
		}
		problems = errors.Join(problems, err)
	}
	return c, problems == nil
}

// origin compares a committed offset with the current topic. An offset that is not ours was
// committed on purpose: brokers remove the offsets of a deleted topic.
func (c *committedOffset) origin(log *topicLog) commitOrigin {
	if c == nil || c.offset < 0 {
		return commitNone
	}
	switch said, ok := parseCommit(c.metadata); {
	case !ok, said.cluster != log.cluster:
		return commitForeign
	case said.offset != c.offset:
		return commitMoved
	case said.topicID != uuid.Nil && log.topicID != uuid.Nil && said.topicID != log.topicID:
		return commitStale
	case said.rewind >= 0:
		return commitRewind
	default:
		return commitOurs
	}
}

// done is the offset up to which a partition is done, to be committed to Kafka.
type done struct {
	topicID uuid.UUID
	offset  int64
	rewind  int64 // where a rewind began that has not reached the position yet; -1: none
}

// mark records that the messages of a partition before offset next are done.
func (s *session) mark(topic string, partition int32, next int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := topicPartition{topic, partition}
	a := s.assignments[key]
	if a == nil {
		return
	}
	rewind := int64(-1)
	if next < a.position {
		rewind = a.begins
	}
	s.marks[key] = done{a.topicID, next, rewind}
	a.position, a.reached = max(a.position, next), next
	a.widen = a.widen || a.begins < a.handledFrom && next >= a.handledFrom
}

// widen extends the stored handled range to the start of a rewind that began before that range and
// has now reached it. A later rewind, after claims were forgotten, must not handle these messages
// again.
func (s *session) widen(ctx context.Context) error {
	group, sql := s.engine.cfg.Group, s.engine.sql.widen
	for {
		s.mu.Lock()
		var key topicPartition
		var a *assignment
		var epoch int64
		for at, one := range s.assignments {
			if one.widen {
				key, a, epoch = at, one, one.epoch
				break
			}
		}
		s.mu.Unlock()
		if a == nil {
			return nil
		}
		tag, err := s.engine.pool.Exec(ctx, sql, group, key.topic, key.partition, epoch, a.begins)
		if err != nil {
			return fmt.Errorf("store what a rewind worked through: %w", err)
		}
		if tag.RowsAffected() == 0 {
			return nil // the position is being taken over again; the next commit retries
		}
		s.mu.Lock()
		a.widen, a.handledFrom = false, a.begins
		s.mu.Unlock()
	}
}

// commitMarks commits the marked offsets. After a failure the next holder may see a few duplicates.
func (s *session) commitMarks(ctx context.Context) {
	s.committing.Lock() // a session that ends waits for a commit in progress
	defer s.committing.Unlock()
	ctx, cancel := context.WithTimeout(ctx, markMax)
	defer cancel()
	if err := s.widen(ctx); err != nil {
		s.engine.cfg.Logger.WarnContext(ctx, "could not store the handled range of a rewind; will retry", "group", s.engine.cfg.Group, "error", err)
	}
	s.mu.Lock()
	marks := s.marks
	s.marks = map[topicPartition]done{}
	s.mu.Unlock()
	if len(marks) == 0 {
		return
	}
	if err := s.commitOffsets(ctx, marks); err != nil {
		s.markAgain(marks)
		s.engine.cfg.Logger.WarnContext(ctx, "could not commit offsets to Kafka; the database has the position", "group", s.engine.cfg.Group, "error", err)
	}
}

// markAgain keeps offsets that could not be committed for the next commit, unless a newer offset
// was marked or the partition was revoked.
func (s *session) markAgain(marks map[topicPartition]done) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, mark := range marks {
		if _, newer := s.marks[key]; !newer && s.assignments[key] != nil {
			s.marks[key] = mark
		}
	}
}

// commitOffsets commits offsets with metadata, which the client's own commits cannot carry.
func (s *session) commitOffsets(ctx context.Context, marks map[topicPartition]done) error {
	offsets := map[string]map[int32]kgo.EpochOffset{}
	for key, mark := range marks {
		if offsets[key.topic] == nil {
			offsets[key.topic] = map[int32]kgo.EpochOffset{}
		}
		offsets[key.topic][key.partition] = kgo.EpochOffset{Epoch: -1, Offset: mark.offset}
	}
	cluster := s.clusterID()
	ctx = kgo.PreCommitFnContext(ctx, func(request *kmsg.OffsetCommitRequest) error {
		for _, topic := range request.Topics {
			for i := range topic.Partitions {
				p := &topic.Partitions[i]
				mark := marks[topicPartition{topic.Topic, p.Partition}]
				text := commitMetadata(cluster, mark.topicID, p.Offset, mark.rewind)
				p.Metadata = &text
			}
		}
		return nil
	})
	var failed error
	s.client.CommitOffsetsSync(ctx, offsets, func(_ *kgo.Client, _ *kmsg.OffsetCommitRequest, response *kmsg.OffsetCommitResponse, err error) {
		failed = err
		if err == nil {
			failed = commitError(response)
		}
	})
	return failed
}

// forget drops the state of partitions that another member may now hold; nil: all.
func (s *session) forget(keys map[string][]int32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if keys == nil {
		clear(s.marks)
		for _, a := range s.assignments {
			a.become(StateUnassigned, nil)
		}
		clear(s.assignments)
	}
	for topic, numbers := range keys {
		for _, number := range numbers {
			key := topicPartition{topic, number}
			if a := s.assignments[key]; a != nil {
				a.become(StateUnassigned, nil)
			}
			delete(s.marks, key)
			delete(s.assignments, key)
		}
	}
}

// keepCommitting commits the marked offsets to Kafka every markEvery.
func (s *session) keepCommitting(ctx context.Context) {
	ticker := time.NewTicker(markEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			s.commitMarks(ctx)
		}
	}
}

func (s *session) clusterID() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cluster
}

func (s *session) setClusterID(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cluster = id
}
