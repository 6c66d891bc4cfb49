package consumer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
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

// Property: a writer of one topic cannot use up the IDs of another: the same ID in two topics has
// an effect in each. Row C28 of guarantees.md.
func TestTopicsDoNotShareIDs(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	other := kafkatest.Topic(t, 1)
	id := headers("message-id=01890000-0000-7000-8000-000000000000")
	client := kafkatest.Client(t)
	require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: other, Value: []byte("attacker"), Headers: id}).FirstErr())
	forever := func(c *consumer.Config) { c.Topics, c.Forever = []string{h.topic, other}, true }
	stop := h.run(consumer.Each(effect), forever)
	h.waitEffects(1)
	h.produceRecords(&kgo.Record{Value: []byte("honest"), Headers: id})
	h.untilEffects(2, stop)
}

// Property: when Kafka has forgotten the offsets of the group, it continues at the database's
// position. Row C35 of guarantees.md.
func TestForgottenOffsetsResumeAtThePosition(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produce("0", "1", "2")
	h.untilEffects(3, h.run(consumer.Each(effect), nil))
	h.wait("group deleted", func() bool {
		deleted, err := kadm.NewClient(kafkatest.Client(t)).DeleteGroup(t.Context(), h.topic)
		return err == nil && deleted.Err == nil
	})
	h.produce("3")
	var again atomic.Int64
	h.untilEffects(4, h.run(consumer.Each(effect), func(c *consumer.Config) {
		c.Hooks.Processed = func(p consumer.Processed) { again.Add(int64(p.Duplicates)) }
	}))
	require.Zero(t, again.Load(), "nothing was redelivered")
}

// Property: a topic that is deleted and recreated, while it is consumed or while it is not, starts
// from its beginning; the effects of both generations are there once. Row C36 of guarantees.md.
func TestRecreatedTopicStartsAnew(t *testing.T) {
	t.Parallel()
	bothModes(t, "running", func(t *testing.T, running bool) {
		t.Helper()
		h := newHarness(t, 1)
		h.kafka = quick()
		h.produce("a0", "a1", "a2")
		stop := h.run(consumer.Each(effect), nil)
		h.waitEffects(3)
		if !running {
			require.NoError(t, stop())
		}
		kafkatest.Recreate(t, h.topic)
		// More than there were before: the old position is within the new topic.
		h.produce("b0", "b1", "b2", "b3", "b4")
		if !running {
			stop = h.run(consumer.Each(effect), nil)
		}
		h.untilEffects(8, stop)
		require.Equal(t, 5, h.position())
	})
}

// Property: so does one that is recreated while it is paused: what the client knew of the earlier one counts for nothing.
func TestPausedTopicIsRecreated(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produce("a0", "a1", "a2")
	c, stop := h.start(consumer.Each(effect), nil)
	h.waitEffects(3)
	h.exec(fmt.Sprintf(`INSERT INTO effectonce.consumer_pauses VALUES ('%[1]s', '%[1]s', 'ops', 'look')`, h.topic))
	h.wait("paused", func() bool { return consumer.State(c, h.topic, 0) == "paused by an operator" })
	kafkatest.Recreate(t, h.topic)
	h.produce("b0")
	h.exec(`UPDATE effectonce.consumer_positions SET next_offset = 2`) // as a failover does: it is acquired again
	h.exec(`DELETE FROM effectonce.consumer_pauses`)
	h.untilEffects(4, stop)
}

// Property: partitions that are added are consumed from their beginning, everything once. Row C37
// of guarantees.md.
func TestAddedPartitionsAreConsumed(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.kafka = quick()
	h.produce("0")
	stop := h.run(consumer.Each(effect), nil)
	h.waitEffects(1)
	added, err := kadm.NewClient(kafkatest.Client(t)).UpdatePartitions(t.Context(), 3, h.topic)
	require.NoError(t, errors.Join(err, added.Error()))
	h.produceTo(2, "1")
	h.untilEffects(2, stop)
}

// Property: a message that grows a thousandfold when it is decompressed is parked by reference, in
// bounded memory. Row C39 of guarantees.md.
func TestDecompressionBombIsParked(t *testing.T) { //nolint:paralleltest // it measures the heap of the process
	longtest.Only(t, "it measures the heap")
	h := newHarness(t, 1)
	const size = 48 << 20
	client := kafkatest.Client(t, kgo.ProducerBatchCompression(kgo.ZstdCompression()), kgo.ProducerBatchMaxBytes(64<<20), kgo.BrokerMaxWriteBytes(100<<20))
	err := client.ProduceSync(t.Context(), &kgo.Record{Topic: h.topic, Key: []byte("k"), Value: make([]byte, size)}).FirstErr()
	require.NoError(t, err)
	h.produceKeyed("a:1")
	stop := h.run(consumer.Each(effect), nil)
	h.waitParked("too_large")
	h.untilEffects(1, stop)
	require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE payload IS NULL AND key = 'k'`))
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	require.Less(t, memory.HeapAlloc, uint64(16*size))
}

// Property: headers that look like another library's attempts, delays or dead letters change
// nothing, and a message with a thousand and one headers is parked. Row C41 of guarantees.md.
func TestForgedHeadersAreIgnored(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	var forged []kgo.RecordHeader
	for _, name := range []string{
		"retry_topic-attempts", "retry_topic-backoff-timestamp", "kafka_dlt-original-topic", "x-delay", "attempts", "effectonce-attempts",
		"kafka_backoffTimestamp", "effectonce-original-message-id",
	} {
		forged = append(forged, kgo.RecordHeader{Key: name, Value: bytes.Repeat([]byte{0x7f}, 8)})
	}
	h.produceRecords(&kgo.Record{Value: []byte("forged"), Headers: forged})
	many := make([]kgo.RecordHeader, 1001)
	for i := range many {
		many[i].Key = fmt.Sprint(i)
	}
	h.produceRecords(&kgo.Record{Value: []byte("many"), Headers: many})
	stop := h.run(consumer.Each(effect), nil)
	h.waitEffects(1)
	h.waitParked("invalid")
	require.NoError(t, stop())
}

// Property: a dead letter that Kafka would not accept is parked instead, so a message can always be
// given up. Any header values and any error text can be stored; a message with a header whose name cannot
// is refused. Row C40 of guarantees.md.
func TestWhatCannotBeADeadLetterIsParked(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	value := strings.Repeat("x", 999_500) // too large with the headers of a dead letter
	known := consumer.Header{Name: "odd value", Value: []byte{0xff, 0}}
	h.produceRecords(&kgo.Record{Key: []byte("a"), Value: []byte(value), Headers: []kgo.RecordHeader{{Key: known.Name, Value: known.Value}}})
	h.produceRecords(&kgo.Record{Key: []byte("b"), Headers: []kgo.RecordHeader{{Key: known.Name, Value: known.Value}, {Key: "\xff\x00"}, {Key: "\x00"}}})
	var called atomic.Int32
	stop := h.run(consumer.Each(func(context.Context, pgx.Tx, *consumer.Message) error {
		called.Add(1)
		return consumer.Permanent(errors.New("broken \xff\x00 " + strings.Repeat("ü", 5000)))
	}), func(c *consumer.Config) { c.OnFailure, c.DeadLetterTopic = consumer.OnFailureDeadLetter, "letters" })
	h.waitParked("permanent", "invalid")
	require.NoError(t, stop())
	require.EqualValues(t, 1, called.Load())
	require.Equal(t, 2, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE error LIKE '%cannot be a dead letter%'`))
	// After a retry they have the headers that could be stored.
	h.retry()
	var headers []consumer.Header
	h.untilEffects(2, h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		headers = append(headers, msg.Headers...)
		return effect(ctx, tx, msg)
	}), nil))
	require.Equal(t, []consumer.Header{known, known}, headers)
}

// Property: a client that stopped returning records is replaced. Row C13 of guarantees.md.
func TestStuckClientIsReplaced(t *testing.T) {
	t.Parallel()
	h, fake := newFaked(t, 1)
	var stuck atomic.Bool
	var starved atomic.Int64
	answer(fake, func(fetch *kmsg.FetchRequest) kmsg.Response {
		if !stuck.Load() {
			return nil
		}
		starved.Add(1)
		return fetch.ResponseKind() // nothing, as from a broker that lost the session
	})
	h.produce("0")
	h.tune = func(c *consumer.Consumer) { consumer.LookEvery(c, 200*time.Millisecond) }
	stop := h.run(consumer.Each(effect), nil)
	h.waitEffects(1)
	h.waitNumber(1, `SELECT count(*) FROM effectonce.consumer_positions WHERE caught_up_at IS NOT NULL`)
	stuck.Store(true)
	h.wait("no fetch is under way that could bring it", func() bool { return starved.Load() > 1 })
	h.produce("1")
	h.wait("replaced", func() bool { return strings.Contains(h.log.String(), "do not arrive") })
	stuck.Store(false)
	h.untilEffects(2, stop)
}

// leaderless makes partition 1 of a kfake not answer where it begins and ends, as without a leader.
func leaderless(fake *kfake.Cluster) (broken *atomic.Bool) {
	broken = &atomic.Bool{}
	broken.Store(true)
	answer(fake, func(asked *kmsg.ListOffsetsRequest) kmsg.Response {
		if !broken.Load() || !asksFor(asked, 1) {
			return nil
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
		return response
	})
	return broken
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
// begins when it has a leader; none of its messages is lost.
func TestPartitionWithoutLeaderWaitsAlone(t *testing.T) {
	t.Parallel()
	h, fake := newFaked(t, 2)
	broken := leaderless(fake)
	h.produceEach(0, "0")
	h.produceEach(1, "1")
	c, stop := h.start(consumer.Each(effect), nil)
	h.waitEffects(1)
	require.Equal(t, []string{"0"}, h.values())
	require.Equal(t, "running", consumer.State(c, h.topic, 0))
	h.wait("it waits", func() bool { return consumer.State(c, h.topic, 1) == "waiting" })
	broken.Store(false)
	h.waitEffects(2)
	require.Equal(t, "running", consumer.State(c, h.topic, 1))
	h.produceEach(1, "2")
	h.untilEffects(3, stop)
	require.Equal(t, []string{"0", "1", "2"}, h.values())
}

// Property: a topic that does not exist is an error at the start, which names it; if configured,
// the consumer waits for it and logs that.
func TestMissingTopic(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	missing := kafkatest.UnusedTopic(t)
	c := h.make(consumer.Each(effect), func(c *consumer.Config) { c.Topics = append(c.Topics, missing) })
	err := c.Run(t.Context())
	require.ErrorIs(t, err, consumer.ErrUnknownTopic)
	require.ErrorContains(t, err, missing)
	require.NotContains(t, err.Error(), h.topic+",")
}

// refused makes a kfake answer questions about topics with an error.
func refused(fake *kfake.Cluster, with *kerr.Error) (left *atomic.Int64) {
	left = &atomic.Int64{}
	answer(fake, func(asked *kmsg.MetadataRequest) kmsg.Response {
		if len(asked.Topics) == 0 || left.Add(-1) < 0 {
			return nil
		}
		response, _ := asked.ResponseKind().(*kmsg.MetadataResponse)
		for _, topic := range asked.Topics {
			answer := kmsg.NewMetadataResponseTopic()
			answer.Topic, answer.TopicID, answer.ErrorCode = topic.Topic, topic.TopicID, with.Code
			response.Topics = append(response.Topics, answer)
		}
		return response
	})
	return left
}

// Property: a topic that the consumer may not read does not count as missing: Run does not end. Nor does one that
// the first broker does not know yet.
func TestRefusedTopicIsNoMissingOne(t *testing.T) {
	t.Parallel()
	for err, times := range map[*kerr.Error]int64{kerr.TopicAuthorizationFailed: 3, kerr.UnknownTopicOrPartition: 2} {
		t.Run(err.Message, func(t *testing.T) {
			t.Parallel()
			h, fake := newFaked(t, 1)
			h.produce("0")
			refused(fake, err).Store(times)
			h.untilEffects(1, h.run(consumer.Each(effect), nil))
		})
	}
}
