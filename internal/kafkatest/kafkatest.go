package kafkatest

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/internal/testwait"
)

const (
	createMax   = 2 * time.Minute
	createEvery = 10 * time.Millisecond
)

// shared is the cluster of this process. The first test that needs it starts it, and pgtest.Main
// stops it.
var shared struct { //nolint:gochecknoglobals // what all tests of a process share has no other place
	once  sync.Once
	kafka *servers.Kafka
	err   error // of the start, for every test that asks
}

// Kafka returns the cluster that the tests of this process share.
func Kafka(tb testing.TB) *servers.Kafka {
	tb.Helper()
	shared.once.Do(func() {
		// Other tests use the cluster after this test.
		ctx := context.WithoutCancel(tb.Context())
		shared.kafka, shared.err = servers.StartKafka(ctx, servers.KafkaOptions{})
		if shared.err == nil {
			shared.err = coordinated(ctx, shared.kafka)
		}
		if shared.err == nil {
			tb.Log("shared by the tests of this package:", shared.kafka.Description)
		}
	})
	if shared.err != nil {
		tb.Fatal(shared.err)
	}
	return shared.kafka
}

// Brokers returns the addresses of the shared cluster.
func Brokers(tb testing.TB) []string {
	tb.Helper()
	return Kafka(tb).Brokers
}

// Own returns a cluster that only this test uses, for tests that kill it. kfake, the replacement
// where there is no Docker engine, cannot be killed: check its Kind.
func Own(tb testing.TB) *servers.Kafka {
	tb.Helper()
	return start(tb, servers.KafkaOptions{Own: true})
}

// Fake returns a kfake that only this test uses, for tests that inject faults, whatever else the
// machine has.
func Fake(tb testing.TB, opts ...kfake.Opt) *kfake.Cluster {
	tb.Helper()
	return start(tb, servers.KafkaOptions{Embedded: true, Fake: opts}).Fake
}

func start(tb testing.TB, opts servers.KafkaOptions) *servers.Kafka {
	tb.Helper()
	k, err := servers.StartKafka(tb.Context(), opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Log("a cluster of its own:", k.Description)
	testwait.AtEnd(tb, "stop the test's Kafka", k.Stop)
	if err := coordinated(tb.Context(), k); err != nil {
		tb.Fatal(err)
	}
	return k
}

// coordinated returns when the coordinators of groups answer: a broker creates and loads their
// topic when it is first asked, and until then refuses.
func coordinated(ctx context.Context, kafka *servers.Kafka) error {
	if kafka.Fake != nil {
		return nil
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(kafka.Brokers...))
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, createMax)
	defer cancel()
	for {
		groups, err := kadm.NewClient(client).DescribeGroups(ctx, "0", "1", "2", "3") // one in each partition of their topic
		for _, group := range groups {
			if kerr.IsRetriable(group.Err) {
				err = group.Err
			}
		}
		if err == nil {
			return nil
		}
		if !pause.For(ctx, createEvery) {
			return fmt.Errorf("wait for the coordinators of groups: %w", err)
		}
	}
}

// Client returns a client of the shared cluster, closed when the test ends.
func Client(tb testing.TB, opts ...kgo.Opt) *kgo.Client {
	tb.Helper()
	return ClientAt(tb, Brokers(tb), opts...)
}

// ClientAt is Client for another cluster.
func ClientAt(tb testing.TB, brokers []string, opts ...kgo.Opt) *kgo.Client {
	tb.Helper()
	client := open(tb, brokers, opts...)
	// Close alone would wait forever for a test that ended between a poll and its AllowRebalance.
	tb.Cleanup(client.CloseAllowingRebalance)
	return client
}

func open(tb testing.TB, brokers []string, opts ...kgo.Opt) *kgo.Client {
	tb.Helper()
	client, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(brokers...)}, opts...)...)
	if err != nil {
		tb.Fatalf("open a Kafka client: %v", err)
	}
	return client
}

// Topic creates a topic in the shared cluster and deletes it when the test ends. configs are pairs
// of a name and a value, such as "cleanup.policy", "compact".
func Topic(tb testing.TB, partitions int, configs ...string) string {
	tb.Helper()
	brokers := Brokers(tb)
	name := TopicAt(tb, brokers, partitions, configs...)
	admin := kadm.NewClient(ClientAt(tb, brokers))
	testwait.AtEnd(tb, "delete topic "+name, func(ctx context.Context) error {
		_, err := admin.DeleteTopic(ctx, name)
		return err
	})
	testwait.Explain(tb, "topic "+name, func() string { return lags(context.WithoutCancel(tb.Context()), admin, name) })
	return name
}

// lags says where a topic ends, and how far the groups are that read it.
func lags(ctx context.Context, admin *kadm.Client, topic string) string {
	var b strings.Builder
	ends, err := admin.ListEndOffsets(ctx, topic)
	ends.Each(func(end kadm.ListedOffset) { fmt.Fprintf(&b, "partition %d ends at %d\n", end.Partition, end.Offset) })
	groups, failed := admin.Lag(ctx)
	for _, group := range groups.Sorted() {
		for partition, lag := range group.Lag[topic] {
			fmt.Fprintf(&b, "group %s, %s, is at %d of partition %d, %d behind\n", group.Group, group.State, lag.Commit.At, partition, lag.Lag)
		}
	}
	if err = errors.Join(err, failed); err != nil {
		fmt.Fprintln(&b, err)
	}
	return b.String()
}

// TopicAt is Topic for a cluster of the test, which may be down when the test ends: the topic ends
// with it.
func TopicAt(tb testing.TB, brokers []string, partitions int, configs ...string) string {
	tb.Helper()
	if len(configs)%2 != 0 {
		tb.Fatalf("create a topic: %q are not pairs of a name and a value", configs)
	}
	values := map[string]*string{}
	for pair := range slices.Chunk(configs, 2) {
		values[pair[0]] = &pair[1]
	}
	name := topicName(tb.Name())
	create(tb, kadm.NewClient(ClientAt(tb, brokers)), name, partitions, values)
	return name
}

// create returns once the topic can be used: brokers learn of it after the controller has answered.
func create(tb testing.TB, admin *kadm.Client, name string, partitions int, configs map[string]*string) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), createMax)
	defer cancel()
	if _, err := admin.CreateTopic(ctx, int32(partitions), -1, configs, name); err != nil {
		tb.Fatalf("create topic %s: %v", name, err)
	}
	until(tb, "topic "+name+" can be used", func(ctx context.Context) error {
		offsets, err := admin.ListStartOffsets(ctx, name)
		return cmp.Or(err, offsets.Error())
	})
}

// Gone waits until brokers show none of topics, or no topic at all where none is named: brokers
// learn of a deletion after the controller has answered.
func Gone(tb testing.TB, brokers []string, topics ...string) {
	tb.Helper()
	admin := kadm.NewClient(ClientAt(tb, brokers, kgo.MetadataMinAge(createEvery))) // it remembers what it saw for so long
	until(tb, "topics are deleted", func(ctx context.Context) error {
		listed, err := admin.ListTopics(ctx)
		left := slices.DeleteFunc(listed.Names(), func(name string) bool {
			return len(topics) > 0 && !slices.Contains(topics, name)
		})
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("%q are there", left)
		}
		return err
	})
}

// topicName names the test for readers of Kafka's log.
func topicName(test string) string {
	test = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '_' {
			return r
		}
		return '-' // names with a dot and with an underscore would collide in Kafka's metrics
	}, test)
	return test[:min(len(test), 200)] + "-" + strings.ToLower(rand.Text()[:10])
}
