package consumer_test

import (
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
)

// leaderless is a kfake whose partition 1 does not answer where it begins and ends, as without a
// leader.
func leaderless(t *testing.T, topic string) (fake *kfake.Cluster, broken *atomic.Bool) {
	t.Helper()
	fake = kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(2, topic))
	broken = &atomic.Bool{}
	broken.Store(true)
	fake.ControlKey(int16(kmsg.ListOffsets), func(request kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		asked, _ := request.(*kmsg.ListOffsetsRequest)
		if !broken.Load() || !asksFor(asked, 1) {
			return nil, nil, false
		}
		response, _ := asked.ResponseKind().(*kmsg.ListOffsetsResponse)
		for _, topic := range asked.Topics {
			answer := kmsg.NewListOffsetsResponseTopic()
			answer.Topic = topic.Topic
			for _, p := range topic.Partitions {
				one := kmsg.NewListOffsetsResponseTopicPartition()
				one.Partition, one.Offset = p.Partition, p.Timestamp+2 // one record: -2 asks for the start, -1 for the end
				if p.Partition == 1 {
					one.ErrorCode, one.Offset = kerr.LeaderNotAvailable.Code, -1
				}
				answer.Partitions = append(answer.Partitions, one)
			}
			response.Topics = append(response.Topics, answer)
		}
		return response, nil, true
	})
	return fake, broken
}

func asksFor(request *kmsg.ListOffsetsRequest, partition int32) bool {
	for _, topic := range request.Topics {
		for _, p := range topic.Partitions {
			if p.Partition == partition {
				return true
			}
		}
	}
	return false
}

// Property: a partition without a leader does not stop the other partitions of the assignment, and
// begins when it has a leader; none of its messages is lost. Issue B11.
func TestPartitionWithoutLeaderWaitsAlone(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	fake, broken := leaderless(t, h.topic)
	client := kafkatest.ClientAt(t, fake.ListenAddrs(), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	for partition, value := range []string{"0", "1"} {
		require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: h.topic, Partition: int32(partition), Value: []byte(value)}).FirstErr())
	}
	c, stop := h.start(fake.ListenAddrs(), consumer.Each(effect), nil)
	h.waitEffects(1)
	require.Equal(t, []string{"0"}, h.values())
	require.Equal(t, "running", consumer.State(c, h.topic, 0))
	h.wait("it waits", func() bool { return consumer.State(c, h.topic, 1) == "waiting" })
	broken.Store(false)
	h.waitEffects(2)
	require.Equal(t, "running", consumer.State(c, h.topic, 1))
	require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: h.topic, Partition: 1, Value: []byte("2")}).FirstErr())
	h.waitEffects(3)
	require.NoError(t, stop())
	require.Equal(t, []string{"0", "1", "2"}, h.values())
}

// Property: a topic that does not exist is an error at the start, which names it; if configured,
// the consumer waits for it and logs that. Issue E.
func TestMissingTopic(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	missing := kafkatest.UnusedTopic(t)
	misspelt := func(c *consumer.Config) { c.Topics = []string{h.topic, missing} }
	c, err := consumer.New(h.pool, []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}, consumer.Each(effect), consumer.Config{Group: h.topic, Topics: []string{h.topic, missing}})
	require.NoError(t, err)
	err = c.Run(t.Context())
	require.ErrorIs(t, err, consumer.ErrUnknownTopic)
	require.ErrorContains(t, err, missing)
	require.NotContains(t, err.Error(), h.topic+",")

	h.produce("0")
	stop := h.runWith(h.pool, quick(), consumer.Each(effect), func(c *consumer.Config) {
		misspelt(c)
		c.MissingTopic = consumer.MissingTopicWait
	})
	h.waitEffects(1)
	h.wait("said", func() bool { return strings.Contains(h.log.String(), "topics do not exist") })
	kafkatest.CreateTopic(t, missing, 1)
	client := kafkatest.Client(t)
	require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: missing, Value: []byte("1")}).FirstErr())
	h.waitEffects(2)
	require.NoError(t, stop())
}

// Property: a topic that the consumer may not read does not count as missing: Run does not end.
func TestForbiddenTopicIsNoMissingOne(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	fake := kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, h.topic))
	var forbidden atomic.Bool
	forbidden.Store(true)
	var refused atomic.Int64
	fake.ControlKey(int16(kmsg.Metadata), func(request kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		asked, _ := request.(*kmsg.MetadataRequest)
		if !forbidden.Load() || len(asked.Topics) == 0 {
			return nil, nil, false
		}
		refused.Add(1)
		response, _ := asked.ResponseKind().(*kmsg.MetadataResponse)
		for _, topic := range asked.Topics {
			answer := kmsg.NewMetadataResponseTopic()
			answer.Topic, answer.TopicID, answer.ErrorCode = topic.Topic, topic.TopicID, kerr.TopicAuthorizationFailed.Code
			response.Topics = append(response.Topics, answer)
		}
		return response, nil, true
	})
	client := kafkatest.ClientAt(t, fake.ListenAddrs())
	_, stop := h.startWith(h.pool, append(quick(), kgo.SeedBrokers(fake.ListenAddrs()...)), consumer.Each(effect), nil)
	h.wait("refused to the session, too", func() bool { return refused.Load() > 2 })
	forbidden.Store(false)
	require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: h.topic, Value: []byte("0")}).FirstErr())
	h.waitEffects(1)
	require.NoError(t, stop())
}
