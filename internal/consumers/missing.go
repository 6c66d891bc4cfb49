package consumers

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
)

// Missing returns those of the topics that Kafka does not have. A topic that the client may not see is none of them.
func Missing(ctx context.Context, admin *kadm.Client, topics []string) ([]string, error) {
	topics = slices.Compact(slices.Sorted(slices.Values(topics)))
	if len(topics) == 0 { // that would mean all
		return nil, nil
	}
	details, err := admin.ListTopics(ctx, topics...)
	if err != nil {
		return nil, fmt.Errorf("ask which topics exist: %w", err)
	}
	return slices.DeleteFunc(topics, func(topic string) bool { return !Absent(details, topic) }), nil
}

// Absent is true of a topic that was asked for and does not exist.
func Absent(details kadm.TopicDetails, topic string) bool {
	d, listed := details[topic]
	return !listed || errors.Is(d.Err, kerr.UnknownTopicOrPartition) || errors.Is(d.Err, kerr.InvalidTopicException)
}
