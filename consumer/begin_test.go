package consumer_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
)

// byPosition deduplicates by position alone.
func byPosition(c *consumer.Config) { c.Dedup = consumer.DedupByPosition }

// quick is a client that soon sees new partitions.
func quick() []kgo.Opt {
	return []kgo.Opt{kgo.MetadataMaxAge(time.Second), kgo.MetadataMinAge(100 * time.Millisecond)}
}

// rewind does what an operator does with Kafka's tools, while no consumer runs: it sets the group's
// offset.
func (h *harness) rewind(to int64, metadata string) {
	h.t.Helper()
	var offsets kadm.Offsets
	offsets.Add(kadm.Offset{Topic: h.topic, Partition: 0, At: to, LeaderEpoch: -1, Metadata: metadata})
	h.wait("offset set", func() bool { // the group may still be leaving
		done, err := kadm.NewClient(kafkatest.Client(h.t)).CommitOffsets(h.t.Context(), h.topic, offsets)
		return err == nil && done.Error() == nil
	})
}

// produceTo sends one record to a partition.
func (h *harness) produceTo(partition int32, value string) {
	h.t.Helper()
	h.wait("written to a partition", func() bool {
		client := kafkatest.Client(h.t, kgo.RecordPartitioner(kgo.ManualPartitioner())) // which asks for the partitions anew
		defer client.Close()
		return client.ProduceSync(h.t.Context(), &kgo.Record{Topic: h.topic, Partition: partition, Value: []byte(value)}).FirstErr() == nil
	})
}

// handledFrom is the begin of the handled range of partition 0.
func (h *harness) handledFrom() int {
	h.t.Helper()
	return h.number(`SELECT handled_from FROM effectonce.consumer_positions WHERE topic = $1 AND partition = 0`, h.topic)
}

// Property: messages that the group's first offset skips do not count as handled: a rewind handles them. An
// interrupted rewind continues where it was, and when it is finished its messages count as handled.
func TestInterruptedRewindGoesOn(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produce("0", "1", "2", "3", "4", "5")
	h.rewind(6, "")
	stop := h.run(consumer.Each(effect), nil)
	h.waitHandled(6)
	h.produce("6")
	h.untilEffects(1, stop)
	h.rewind(1, "")
	reached := make(chan struct{})
	var once sync.Once
	stop = h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if msg.Offset < 3 {
			return effect(ctx, tx, msg)
		}
		once.Do(func() { close(reached) })
		<-ctx.Done()
		return ctx.Err()
	}), func(c *consumer.Config) { c.BatchMax, c.DrainMax = 1, time.Millisecond })
	<-reached
	require.NoError(t, stop())
	require.Equal(t, []string{"6", "1", "2"}, h.values())
	require.Equal(t, 3, h.position(), "a rewind is an order")
	require.Equal(t, 6, h.handledFrom())
	stop = h.run(consumer.Each(effect), nil)
	h.waitEffects(6)
	h.untilHandled(7, stop)
	stop = h.run(consumer.Each(effect), nil)
	h.wait("they count as worked through", func() bool { return h.handledFrom() == 1 })
	require.NoError(t, stop())
	require.Equal(t, []string{"6", "1", "2", "3", "4", "5"}, h.values())
}

// Property: a new name in an old group has handled nothing: it resumes at the position, also if the
// group's own commit lags, and a rewind handles for the new name what the old one handled. Issue
// A4.
func TestNewNameWorkedThroughNothing(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produce("0", "1", "2", "3")
	h.untilEffects(4, h.run(consumer.Each(effect), nil))
	id, cluster := h.topicID()
	h.rewind(2, consumer.CommitMetadata(cluster, id, 2)) // as if the last commit had not arrived
	renamed := func(c *consumer.Config) { c.Name = h.topic + "-renamed" }
	stop := h.run(consumer.Each(effect), renamed)
	h.wait("taken over", func() bool { return h.handledFrom() == 4 })
	h.produce("4")
	h.untilEffects(5, stop)
	require.Contains(t, h.log.String(), `committed=2 committed_by="committed by this consumer"`)
	h.rewind(1, "")
	stop = h.run(consumer.Each(effect), renamed)
	h.waitEffects(8)
	h.untilHandled(5, stop)
	stop = h.run(consumer.Each(effect), renamed)
	h.wait("acquired again", func() bool { return h.handledFrom() == 1 })
	require.NoError(t, stop())
	require.Equal(t, []string{"0", "1", "2", "3", "4", "1", "2", "3"}, h.values())
	require.Equal(t, 1, h.handledFrom(), "the rewind worked through the rest")
}

func (h *harness) topicID() (id uuid.UUID, cluster string) {
	h.t.Helper()
	metadata, err := kadm.NewClient(kafkatest.Client(h.t)).Metadata(h.t.Context(), h.topic)
	require.NoError(h.t, err)
	return uuid.UUID(metadata.Topics[h.topic].ID), metadata.Cluster
}

// Property: of a group whose offsets were set to the ends of its topics before it first ran, partitions
// that are added later begin at their start, and so does a recreated topic.
func TestLatestLosesNothingThatComesLater(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceTo(0, "before")
	h.rewind(1, "")
	h.untilHandled(1, h.run(consumer.Each(effect), nil))
	added, err := kadm.NewClient(kafkatest.Client(t)).UpdatePartitions(t.Context(), 2, h.topic)
	require.NoError(t, errors.Join(err, added.Error()))
	h.produceTo(1, "added")
	h.produceTo(0, "after")
	h.untilEffects(2, h.run(consumer.Each(effect), nil))
	require.ElementsMatch(t, []string{"added", "after"}, h.values())

	kafkatest.Recreate(t, h.topic)
	h.produceTo(0, "anew")
	h.untilEffects(3, h.run(consumer.Each(effect), nil))
}

// Property: offsets that were translated for a topic with another ID are where the group continues;
// those that this group committed itself, for an earlier topic of the same name in the same
// cluster, are not.
func TestCommittedOffsetsOfAnotherTopicID(t *testing.T) {
	t.Parallel()
	type testCase struct {
		metadata func(cluster string, earlier uuid.UUID) string
		want     []string
	}
	each(t, map[string]testCase{
		"translated":      {func(_ string, id uuid.UUID) string { return consumer.CommitMetadata("the other cluster", id, 7) }, []string{"b3", "b4"}},
		"by another tool": {func(string, uuid.UUID) string { return "" }, []string{"b3", "b4"}},
		"our own": {
			func(cluster string, id uuid.UUID) string { return consumer.CommitMetadata(cluster, id, 3) },
			[]string{"b0", "b1", "b2", "b3", "b4"},
		},
	}, func(t *testing.T, h *harness, _ string, c testCase) {
		t.Helper()
		h.produce("a0", "a1", "a2")
		h.untilEffects(3, h.run(consumer.Each(effect), nil))
		earlier, cluster := h.topicID()
		kafkatest.Recreate(t, h.topic)
		h.produce("b0", "b1", "b2", "b3", "b4")
		h.rewind(3, c.metadata(cluster, earlier))
		h.untilHandled(5, h.run(consumer.Each(effect), nil))
		require.Equal(t, c.want, h.values()[3:])
		require.Contains(t, h.log.String(), "committed_by=")
	})
}
