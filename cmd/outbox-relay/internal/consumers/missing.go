package consumers

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
)

// Missing returns those of the topics that Kafka does not have. It does not return topics that the
// client may not see.
func Missing(ctx context.Context, admin *kadm.Client, topics []string) ([]string, error) {
	topics = slices.Compact(slices.Sorted(slices.Values(topics)))
	if len(topics) == 0 { // an empty list would mean all
		return nil, nil
	}
	details, err := admin.ListTopics(ctx, topics...)
	if err != nil {
		return nil, fmt.Errorf("list topics: %w", err)
	}
	return slices.DeleteFunc(topics, func(topic string) bool { return !Absent(details, topic) }), nil
}

// Absent reports whether a topic that was asked for does not exist.
func Absent(details kadm.TopicDetails, topic string) bool {
	d, listed := details[topic]
	return !listed || errors.Is(d.Err, kerr.UnknownTopicOrPartition) || errors.Is(d.Err, kerr.InvalidTopicException)
}
