package consumer_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
)

// Property: two holders that take a partition from each other back off: in ten seconds there are a
// few epochs, not one for each transaction. Whatever they do, each message has its effect once.
func TestTwoHoldersDoNotTakeAPartitionBackAndForth(t *testing.T) {
	longtest.Only(t, "it counts takeovers in real time")
	t.Parallel()
	for _, order := range []consumer.Order{consumer.OrderByPartition, consumer.OrderByKey, consumer.OrderUnordered} {
		t.Run(fmt.Sprint(order), func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			const n = 2000
			records := make([]*kgo.Record, n)
			client := kafkatest.Client(t, kgo.RecordPartitioner(kgo.ManualPartitioner()))
			defer client.Close()
			for i := range records {
				records[i] = &kgo.Record{Topic: h.topic, Value: []byte(fmt.Sprint(i)), Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte(fmt.Sprint(i))}}}
			}
			require.NoError(t, client.ProduceSync(t.Context(), records...).FirstErr())
			settings := func(c *consumer.Config) { c.BatchMax, c.Order = 1, order }
			slow := consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
				if _, err := tx.Exec(ctx, `SELECT pg_sleep(0.02)`); err != nil { // there is work for as long as the test observes
					return err
				}
				return effect(ctx, tx, msg)
			})
			stop := h.run(slow, settings)
			h.wait("the first holder works", func() bool { return h.number(`SELECT count(*) FROM effects`) > 10 })
			cfg := consumer.Config{Group: h.topic, Topics: []string{h.topic}, RetryMin: time.Millisecond, RetryMax: 50 * time.Millisecond}
			settings(&cfg)
			other, err := consumer.New(h.pool, nil, slow, cfg)
			require.NoError(t, err)
			const epochs = `SELECT max(epoch) FROM effectonce.consumer_positions`
			before, begun := h.number(epochs), time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			_, _ = other.Deliver(ctx, records...)
			taken := h.number(epochs) - before
			t.Logf("%d epochs in %v", taken, time.Since(begun))
			require.GreaterOrEqual(t, taken, 2, "they did take it from each other")
			require.LessOrEqual(t, taken, 12)
			require.NoError(t, stop())
			require.Equal(t, h.number(`SELECT count(*) FROM effects`), h.number(`SELECT count(DISTINCT message_id) FROM effects`))
		})
	}
}

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

// Property: a failover that loses the takeover of a partition, and what was handled since, is noticed
// even if no further message arrives.
func TestIdleConsumerNoticesALostTakeover(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	for i := range 10 {
		h.produceAs(fmt.Sprint(i), fmt.Sprint(i))
	}
	stop := h.run(consumer.Each(effect), nil)
	h.waitEffects(10)
	h.exec(`WITH lost AS (DELETE FROM effects WHERE n > 4 RETURNING message_id), unclaimed AS (
		DELETE FROM effectonce.processed_messages WHERE message_id IN (SELECT message_id FROM lost))
		UPDATE effectonce.consumer_positions SET next_offset = 4, epoch = epoch - 1`)
	h.waitEffects(10)
	require.NoError(t, stop())
	require.Contains(t, h.log.String(), "lost commits")
}

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
