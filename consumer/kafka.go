package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
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
	commitForeign                     // another program, perhaps over one of ours, or a mirror of another cluster
)

func (o commitOrigin) String() string {
	return [...]string{"none", "committed by this consumer", "of an earlier topic", "committed by another program"}[o]
}

// The metadata of a commit names the log that it belongs to. Otherwise an offset of a topic that
// was deleted and recreated, or one that a mirror translated for another cluster, would look like
// an offset of this log.
const commitVersion = "effectonce/1"

// commitMetadata has the form of commitForm.
func commitMetadata(cluster string, topicID uuid.UUID, offset int64) string {
	return fmt.Sprintf("%s cluster=%s topic=%s offset=%d", commitVersion, cluster, topicID, offset)
}

var commitForm = regexp.MustCompile(`^` + commitVersion + ` cluster=(\S*) topic=(\S+) offset=(\d+)$`)

// origin compares a committed offset with the current topic. An offset that is not ours was
// committed on purpose: brokers remove the offsets of a deleted topic.
func (c *committedOffset) origin(log *topicLog) commitOrigin {
	if c == nil || c.offset < 0 {
		return commitNone
	}
	said := commitForm.FindStringSubmatch(c.metadata)
	if said == nil || said[1] != log.cluster {
		return commitForeign
	}
	topicID, err := uuid.Parse(said[2])
	switch {
	case err != nil, said[3] != strconv.FormatInt(c.offset, 10):
		return commitForeign
	case topicID != uuid.Nil && log.topicID != uuid.Nil && topicID != log.topicID:
		return commitStale
	default:
		return commitOurs
	}
}

// String returns the committed offset for a log line.
func (c *committedOffset) String() string {
	if c == nil {
		return "none"
	}
	return fmt.Sprint(c.offset)
}

// mark records that the messages of a partition before offset next are done.
func (s *session) mark(p *partition, next int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a := s.assignments[p.key()]; a != nil && a.pos == p.pos {
		a.mark, a.reached, a.attempt = next, next, 0
	}
}

// commitMarks commits the marked offsets to Kafka. They are advisory: after a failure the next holder
// may see a few duplicates, and it is tried again with the next commit.
func (s *session) commitMarks(ctx context.Context) error {
	s.committing.Lock() // a session that ends waits for a commit in progress
	defer s.committing.Unlock()
	ctx, cancel := context.WithTimeout(ctx, markMax)
	defer cancel()
	offsets := map[string]map[int32]kgo.EpochOffset{}
	topicIDs := map[topicPartition]uuid.UUID{}
	s.mu.Lock()
	cluster := s.cluster
	for key, a := range s.assignments {
		if a.mark < 0 {
			continue
		}
		if offsets[key.topic] == nil {
			offsets[key.topic] = map[int32]kgo.EpochOffset{}
		}
		offsets[key.topic][key.partition] = kgo.EpochOffset{Epoch: -1, Offset: a.mark}
		topicIDs[key], a.mark = a.pos.topicID, -1
	}
	s.mu.Unlock()
	if len(offsets) == 0 {
		return nil
	}
	ctx = kgo.PreCommitFnContext(ctx, func(request *kmsg.OffsetCommitRequest) error {
		for _, topic := range request.Topics {
			for i := range topic.Partitions {
				p := &topic.Partitions[i]
				text := commitMetadata(cluster, topicIDs[topicPartition{topic.Topic, p.Partition}], p.Offset)
				p.Metadata = &text // the client's own commits cannot carry any
			}
		}
		return nil
	})
	var failed error
	s.client.CommitOffsetsSync(ctx, offsets, func(_ *kgo.Client, _ *kmsg.OffsetCommitRequest, response *kmsg.OffsetCommitResponse, err error) {
		if failed = err; err == nil {
			failed = commitError(response)
		}
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	for key := range topicIDs {
		if a := s.assignments[key]; failed != nil && a != nil && a.mark < 0 { // unless there is a newer mark
			a.mark = offsets[key.topic][key.partition].Offset
		}
	}
	return failed
}

// askMax bounds a request to the brokers about partitions: if one leader does not answer, the other
// partitions must still begin.
const askMax = 5 * time.Second

var errNoAnswer = errors.New("no answer about the partition")

// compare orders partitions. Rows are locked in this order.
func (k topicPartition) compare(other topicPartition) int {
	return cmp.Or(strings.Compare(k.topic, other.topic), cmp.Compare(k.partition, other.partition))
}

// ask asks Kafka about partitions. One without an answer waits, which is not an error.
func (s *session) ask(ctx context.Context, holds []*hold) error {
	admin := kadm.NewClient(s.client)
	var topics []string // holds are sorted
	for _, h := range holds {
		topics = append(topics, h.topic)
	}
	topics = slices.Compact(topics)
	metadata, err := admin.Metadata(kadm.WithAuthorizedOps(ctx), topics...) // else from memory: an earlier topic, for up to 5 s
	if err != nil {
		return fmt.Errorf("ask Kafka for topics: %w", err)
	}
	s.mu.Lock()
	s.cluster = metadata.Cluster
	s.mu.Unlock()
	committed, err := admin.FetchOffsets(ctx, s.consumer.cfg.Group)
	if err != nil {
		return fmt.Errorf("ask Kafka for the offsets of the group: %w", err)
	}
	limited, cancel := context.WithTimeout(ctx, askMax)
	defer cancel()
	var firsts, ends kadm.ListedOffsets
	var firstErr, endErr error // some leaders did not answer
	var asking sync.WaitGroup
	asking.Go(func() { firsts, firstErr = admin.ListStartOffsets(limited, topics...) })
	asking.Go(func() { ends, endErr = admin.ListEndOffsets(limited, topics...) })
	asking.Wait()
	for _, h := range holds {
		topic := metadata.Topics[h.topic]
		first, hasFirst := firsts.Lookup(h.topic, h.partition)
		end, hasEnd := ends.Lookup(h.topic, h.partition)
		offset, known := committed.Lookup(h.topic, h.partition)
		err := cmp.Or(topic.Err, first.Err, end.Err, offset.Err)
		if err == nil && (!hasFirst || !hasEnd || first.Offset < 0 || end.Offset < first.Offset) {
			err = errors.Join(errNoAnswer, firstErr, endErr) // a client would read a negative offset as the end of the topic
		}
		if err != nil {
			h.waits = fmt.Errorf("ask Kafka about %s/%d: %w", h.topic, h.partition, err)
			continue
		}
		h.log = &topicLog{cluster: metadata.Cluster, topicID: uuid.UUID(topic.ID), first: first.Offset, end: end.Offset}
		if known && offset.At >= 0 {
			h.log.committed = &committedOffset{offset.At, offset.Metadata}
		}
	}
	return nil
}

func commitError(response *kmsg.OffsetCommitResponse) error {
	for _, topic := range response.Topics {
		for _, p := range topic.Partitions {
			if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
				return fmt.Errorf("%s/%d: %w", topic.Topic, p.Partition, err)
			}
		}
	}
	return nil
}
