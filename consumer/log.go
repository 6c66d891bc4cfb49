package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// askMax bounds a request to the brokers about partitions: if one leader does not answer, the other
// partitions must still begin.
const askMax = 5 * time.Second

var errNoAnswer = errors.New("no answer about the partition")

// topicLogs is Kafka's answer about partitions, and the partitions without an answer.
type topicLogs struct {
	logs   map[topicPartition]*topicLog
	silent map[topicPartition]error
	// counts are the numbers of partitions, by topic.
	counts map[string]int32
}

// compare orders partitions. Rows are locked in this order.
func (k topicPartition) compare(other topicPartition) int {
	return cmp.Or(strings.Compare(k.topic, other.topic), cmp.Compare(k.partition, other.partition))
}

// ask asks Kafka about partitions. A partition without an answer is not an error: it is in silent.
func (s *session) ask(ctx context.Context, keys []topicPartition) (topicLogs, error) {
	answer := topicLogs{logs: map[topicPartition]*topicLog{}, silent: map[topicPartition]error{}, counts: map[string]int32{}}
	admin := kadm.NewClient(s.client)
	metadata, err := admin.Metadata(ctx, topicsOf(keys)...)
	if err != nil {
		return answer, fmt.Errorf("ask Kafka for topics: %w", err)
	}
	s.mu.Lock()
	s.cluster = metadata.Cluster
	s.mu.Unlock()
	committed, err := admin.FetchOffsets(ctx, s.consumer.cfg.Group)
	if err != nil {
		return answer, fmt.Errorf("ask Kafka for the offsets of the group: %w", err)
	}
	keys = slices.Clone(keys)
	// A group that begins at the end of a topic needs the ends of all its partitions at the first
	// contact.
	for name, topic := range metadata.Topics {
		answer.counts[name] = int32(len(topic.Partitions))
		for number := range topic.Partitions {
			if s.consumer.cfg.Start == StartLatest && topic.Err == nil {
				keys = append(keys, topicPartition{name, number})
			}
		}
	}
	slices.SortFunc(keys, topicPartition.compare)
	keys = slices.Compact(keys)
	limited, cancel := context.WithTimeout(ctx, askMax)
	defer cancel()
	var firsts, ends kadm.ListedOffsets
	var firstErr, endErr error // some leaders did not answer
	var asking sync.WaitGroup
	asking.Go(func() { firsts, firstErr = admin.ListStartOffsets(limited, topicsOf(keys)...) })
	asking.Go(func() { ends, endErr = admin.ListEndOffsets(limited, topicsOf(keys)...) })
	asking.Wait()
	for _, key := range keys {
		topic := metadata.Topics[key.topic]
		first, hasFirst := firsts.Lookup(key.topic, key.partition)
		end, hasEnd := ends.Lookup(key.topic, key.partition)
		offset, known := committed.Lookup(key.topic, key.partition)
		err := cmp.Or(topic.Err, first.Err, end.Err, offset.Err)
		if err == nil && (!hasFirst || !hasEnd || first.Offset < 0 || end.Offset < first.Offset) {
			err = errors.Join(errNoAnswer, firstErr, endErr) // a client would read a negative offset as the end of the topic
		}
		if err != nil {
			answer.silent[key] = fmt.Errorf("ask Kafka about %s/%d: %w", key.topic, key.partition, err)
			continue
		}
		log := &topicLog{cluster: metadata.Cluster, topicID: uuid.UUID(topic.ID), first: first.Offset, end: end.Offset}
		if known && offset.At >= 0 {
			log.committed = &committedOffset{offset.At, offset.Metadata}
		}
		answer.logs[key] = log
	}
	return answer, nil
}

func topicsOf(keys []topicPartition) []string {
	var names []string
	for _, key := range keys {
		names = append(names, key.topic)
	}
	slices.Sort(names)
	return slices.Compact(names)
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
