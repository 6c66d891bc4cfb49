package consumer_test

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
)

// Property: offsets that the coordinator refuses once are committed again, although no message
// follows, and the member stays in its group. Row C13 of guarantees.md.
func TestRefusedCommitIsMadeAgain(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	fake := kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, h.topic))
	var refused, joined atomic.Int64
	fake.ControlKey(int16(kmsg.OffsetCommit), func(request kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		commit, ok := request.(*kmsg.OffsetCommitRequest)
		if !ok || refused.Add(1) > 1 {
			return nil, nil, false
		}
		answer, _ := commit.ResponseKind().(*kmsg.OffsetCommitResponse)
		for _, topic := range commit.Topics {
			of := kmsg.NewOffsetCommitResponseTopic()
			of.Topic, of.TopicID = topic.Topic, topic.TopicID
			for _, partition := range topic.Partitions {
				p := kmsg.NewOffsetCommitResponseTopicPartition()
				p.Partition, p.ErrorCode = partition.Partition, kerr.StaleMemberEpoch.Code
				of.Partitions = append(of.Partitions, p)
			}
			answer.Topics = append(answer.Topics, of)
		}
		return answer, nil, true
	})
	fake.ControlKey(int16(kmsg.JoinGroup), func(kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		joined.Add(1)
		return nil, nil, false
	})
	client := kafkatest.ClientAt(t, fake.ListenAddrs())
	require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: h.topic, Value: []byte("0")}).FirstErr())
	_, stop := h.startWith(h.pool, []kgo.Opt{kgo.SeedBrokers(fake.ListenAddrs()...)}, consumer.Each(effect), nil)
	h.waitEffects(1)
	h.wait("it is refused", func() bool { return refused.Load() > 0 })
	before := joined.Load()
	h.wait("the group's offset", func() bool {
		offsets, err := kadm.NewClient(client).FetchOffsets(t.Context(), h.topic)
		found, ok := offsets.Lookup(h.topic, 0)
		return err == nil && ok && found.At == 1
	})
	require.Equal(t, before, joined.Load(), "it did not join again")
	require.NoError(t, stop())
}
