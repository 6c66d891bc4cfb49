package kafkatest

import (
	"cmp"
	"context"
	"errors"
	"testing"

	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/effectonce/effectonce/internal/testwait"
)

// UnusedTopic returns the name of a topic that does not exist. If the test creates it, it is
// deleted when the test ends.
func UnusedTopic(tb testing.TB) string {
	tb.Helper()
	name := topicName(tb.Name())
	admin := kadm.NewClient(Client(tb))
	testwait.AtEnd(tb, "delete topic "+name, func(ctx context.Context) error {
		_, _ = admin.DeleteTopic(ctx, name) // it may never have been created
		return nil
	})
	return name
}

// CreateTopic creates a topic of a given name in the shared cluster.
func CreateTopic(tb testing.TB, name string, partitions int) {
	tb.Helper()
	create(tb, kadm.NewClient(Client(tb)), name, partitions, nil)
}

// Recreate deletes a topic of the shared cluster and creates it again, with one partition. It
// creates the topic only when brokers no longer show the old one, and returns once they show the
// new one. Otherwise a broker could still write records to the deleted topic, or delete the offsets
// that a group commits for the new one.
func Recreate(tb testing.TB, topic string) {
	tb.Helper()
	if _, err := kadm.NewClient(Client(tb)).DeleteTopic(tb.Context(), topic); err != nil {
		tb.Fatalf("delete topic %s: %v", topic, err)
	}
	Gone(tb, Brokers(tb), topic)
	CreateTopic(tb, topic, 1)
}

// Configure changes one setting of a topic, and returns when brokers show the change.
func Configure(tb testing.TB, topic, name, value string) {
	tb.Helper()
	change := []kadm.AlterConfig{{Op: kadm.SetConfig, Name: name, Value: &value}}
	admin := kadm.NewClient(Client(tb))
	responses, err := admin.AlterTopicConfigs(tb.Context(), change, topic)
	if err == nil {
		_, err = responses.On(topic, func(r *kadm.AlterConfigsResponse) error { return r.Err })
	}
	if err != nil {
		tb.Fatalf("set %s=%s of topic %s: %v", name, value, topic, err)
	}
	until(tb, "brokers show "+name+"="+value, func(ctx context.Context) error {
		described, err := admin.DescribeTopicConfigs(ctx, topic)
		if err != nil {
			return err
		}
		_, err = described.On(topic, func(r *kadm.ResourceConfig) error {
			for _, c := range r.Configs {
				if c.Key == name && c.MaybeValue() == value {
					return nil
				}
			}
			return cmp.Or(r.Err, errors.New("not yet"))
		})
		return err
	})
}

// until waits until a condition returns no error: brokers learn of a change after the controller
// has answered.
func until(tb testing.TB, what string, condition func(ctx context.Context) error) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), testwait.Bound) // of a request that hangs
	defer cancel()
	testwait.For(tb, what, func() (any, bool) {
		err := condition(ctx)
		return err, err == nil
	})
}

// Count returns how many records a topic of the shared cluster holds, without reading them.
// Transaction markers count as records.
func Count(tb testing.TB, topic string) int {
	tb.Helper()
	client := open(tb, Brokers(tb))
	defer client.Close() // now and not at the end of the test: tests call Count in loops
	admin, n := kadm.NewClient(client), 0
	// It fails while a leader is elected, which happens right after a topic was created.
	until(tb, "the offsets of topic "+topic, func(ctx context.Context) error {
		starts, err := admin.ListStartOffsets(ctx, topic)
		if err != nil {
			return err
		}
		ends, err := admin.ListEndOffsets(ctx, topic)
		n = 0
		ends.Each(func(end kadm.ListedOffset) {
			if start, ok := starts.Lookup(topic, end.Partition); ok {
				n += int(end.Offset - start.Offset)
			}
		})
		return err
	})
	return n
}
