package consumer_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
)

func deleteRecords(t *testing.T, topic string, before int64) {
	t.Helper()
	var offsets kadm.Offsets
	offsets.Add(kadm.Offset{Topic: topic, At: before})
	deleted, err := kadm.NewClient(kafkatest.Client(t)).DeleteRecords(t.Context(), offsets)
	require.NoError(t, err)
	require.NoError(t, deleted.Error())
}

// Property: where records were deleted before they were consumed, the partition halts and reports
// it, in the log and in the database, and continues with the remaining records only if that is
// configured. Row C34 of guarantees.md.
func TestDeletedRecordsHaltThePartition(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 2)
	for _, v := range []string{"0", "1", "2", "3", "4"} {
		h.produceAs(v, v)
	}
	stop := h.run(consumer.Each(effect), func(c *consumer.Config) { c.BatchMax = 1 })
	h.waitEffects(5)
	require.NoError(t, stop())
	for _, v := range []string{"5", "6", "7"} {
		h.produceAs(v, v)
	}
	deleteRecords(t, h.topic, 7)

	stop = h.run(consumer.Each(effect), nil)
	h.wait("trouble", func() bool {
		return h.number(`SELECT count(*) FROM effectonce.consumer_positions WHERE trouble LIKE '%records 5 to 6 %were deleted%ResumeEarliest%'`) == 1
	})
	h.wait("said", func() bool { return strings.Contains(h.log.String(), "partition halts") })
	h.produceTo(1, "other")
	h.waitEffects(6) // partition 1 is not halted
	require.NoError(t, stop())
	require.Equal(t, "other", h.values()[5], "it halted, and did not only say so")

	stop = h.run(consumer.Each(effect), func(c *consumer.Config) { c.OutOfRange = consumer.OutOfRangeResumeEarliest })
	h.waitEffects(7)
	h.wait("position", func() bool { return h.position() == 8 })
	require.NoError(t, stop())
	require.Equal(t, "7", h.values()[6])
	require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.operator_actions WHERE what = 'position.reset' AND why LIKE '%were deleted%'`))
	require.Zero(t, h.number(`SELECT count(*) FROM effectonce.consumer_positions WHERE trouble IS NOT NULL`))
}

// Property: if Kafka lost the end of the topic, the partition halts, and new records at old offsets
// are not skipped. Row C34 of guarantees.md.
func TestLostEndHaltsThePartition(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 2)
	h.produceAs("0", "0")
	stop := h.run(consumer.Each(effect), nil)
	h.waitEffects(1)
	require.NoError(t, stop())
	h.exec(`UPDATE effectonce.consumer_positions SET next_offset = 100 WHERE partition = 0`) // as if a hundred had been there
	h.produceAs("1", "1")
	stop = h.run(consumer.Each(effect), nil)
	h.wait("trouble", func() bool {
		return h.number(`SELECT count(*) FROM effectonce.consumer_positions WHERE trouble LIKE '%Kafka lost its end%'`) == 1
	})
	h.produceTo(1, "other")
	h.waitEffects(2) // partition 1 is not halted
	require.NoError(t, stop())
	require.Equal(t, []string{"0", "other"}, h.values(), "it halted, and did not only say so")
	require.Equal(t, 100, h.position())
	stop = h.run(consumer.Each(effect), func(c *consumer.Config) { c.OutOfRange = consumer.OutOfRangeResumeEarliest })
	h.waitEffects(3)
	require.NoError(t, stop())
	require.Equal(t, 2, h.position())
}

// Property: records that are deleted under a running consumer, before it has fetched them, halt the
// partition as those do that are gone at its start. Row C34 of guarantees.md.
func TestRecordsDeletedUnderARunningConsumer(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	fake := kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, h.topic))
	held, starved := emptyFetches(fake)
	client := kafkatest.ClientAt(t, fake.ListenAddrs())
	produce := func(values ...string) {
		for _, v := range values {
			require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: h.topic, Value: []byte(v)}).FirstErr())
		}
	}
	produce("0")
	_, stop := h.startWith(h.pool, []kgo.Opt{kgo.SeedBrokers(fake.ListenAddrs()...)}, consumer.Each(effect), nil)
	h.waitEffects(1)
	held.Store(true)
	h.wait("no fetch is under way", func() bool { return starved.Load() > 1 })
	produce("1", "2", "3")
	var before kadm.Offsets
	before.Add(kadm.Offset{Topic: h.topic, At: 3})
	deleted, err := kadm.NewClient(client).DeleteRecords(t.Context(), before)
	require.NoError(t, err)
	require.NoError(t, deleted.Error())
	held.Store(false)
	h.wait("trouble", func() bool {
		return h.number(`SELECT count(*) FROM effectonce.consumer_positions WHERE trouble LIKE '%records 1 to 2 %were deleted%'`) == 1
	})
	require.NotContains(t, h.log.String(), "do not arrive", "the broker's answer said so, not the watchdog")
	require.NoError(t, stop())
	require.Equal(t, []string{"0"}, h.values())
}
