package consumers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/effectonce/effectonce/internal/pause"
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

// How long, and in which steps, requests to group coordinators are repeated: a broker that has just
// started first creates or loads its __consumer_offsets.
const (
	coordinatorWait = 5 * time.Second
	coordinatorStep = 100 * time.Millisecond
)

// AskCoordinators repeats ask while a group coordinator is not available yet, for at most 5 s. It
// returns ask's last error. The clients of the command line do not retry on their own, so that an
// error is shown and not a timeout.
func AskCoordinators(ctx context.Context, ask func() error) error {
	for waited := time.Duration(0); ; waited += coordinatorStep {
		err := ask()
		if !CoordinatorStarts(err) || waited >= coordinatorWait || !pause.For(ctx, coordinatorStep) {
			return err
		}
	}
}

// CoordinatorStarts reports whether an error is of a group coordinator that becomes available
// without intervention.
func CoordinatorStarts(err error) bool {
	return errors.Is(err, kerr.CoordinatorNotAvailable) || errors.Is(err, kerr.CoordinatorLoadInProgress) || errors.Is(err, kerr.NotCoordinator)
}
