package consumer_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"

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
	require.NoError(t, stop())
	require.Len(t, h.values(), 5)

	stop = h.run(consumer.Each(effect), func(c *consumer.Config) { c.OutOfRange = consumer.OutOfRangeResumeEarliest })
	h.waitEffects(6)
	h.wait("position", func() bool { return h.position() == 8 })
	require.NoError(t, stop())
	require.Equal(t, "7", h.values()[5])
	require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.operator_actions WHERE what = 'position.reset' AND why LIKE '%were deleted%'`))
	require.Zero(t, h.number(`SELECT count(*) FROM effectonce.consumer_positions WHERE trouble IS NOT NULL`))
}

// Property: if Kafka lost the end of the topic, new records at old offsets are not skipped.
func TestLostEndHaltsThePartition(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceAs("0", "0")
	stop := h.run(consumer.Each(effect), nil)
	h.waitEffects(1)
	require.NoError(t, stop())
	h.exec(`UPDATE effectonce.consumer_positions SET next_offset = 100`) // as if a hundred had been there
	h.produceAs("1", "1")
	stop = h.run(consumer.Each(effect), nil)
	h.wait("trouble", func() bool {
		return h.number(`SELECT count(*) FROM effectonce.consumer_positions WHERE trouble LIKE '%Kafka lost its end%'`) == 1
	})
	require.NoError(t, stop())
	stop = h.run(consumer.Each(effect), func(c *consumer.Config) { c.OutOfRange = consumer.OutOfRangeResumeEarliest })
	h.waitEffects(2)
	require.NoError(t, stop())
	require.Equal(t, 2, h.position())
}
