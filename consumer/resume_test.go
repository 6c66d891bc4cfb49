package consumer_test

import (
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
)

// resumeAt orders, as an operator does, where a partition resumes.
func (h *harness) resumeAt(at int64) {
	h.t.Helper()
	tag, err := h.pool.Exec(h.t.Context(), `UPDATE effectonce.consumer_positions SET resume_at = $2 WHERE topic = $1 AND partition = 0`, h.topic, at)
	require.NoError(h.t, err)
	require.EqualValues(h.t, 1, tag.RowsAffected())
}

// Property: an operator's order moves a position, back and forward, once; the messages that it
// skips do not count as handled, and nothing undoes it. Issues A4, A5.
func TestResumeOrderIsCarriedOutOnce(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	for i := range 6 {
		h.produceAs(fmt.Sprint(i), fmt.Sprint(i))
	}
	// The commit of another program, which is behind the order.
	h.rewind(0, "")
	stop := h.run(consumer.Each(effect), byPosition)
	h.waitEffects(6)
	require.NoError(t, stop())

	h.resumeAt(4)
	stop = h.run(consumer.Each(effect), byPosition)
	h.waitEffects(8)
	require.NoError(t, stop())
	require.Equal(t, []string{"4", "5"}, h.values()[6:])
	require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.consumer_positions WHERE resume_at IS NULL AND next_offset = 6 AND handled_from = 4`))

	for i := range 4 {
		h.produceAs(fmt.Sprint(6+i), fmt.Sprint(6+i))
	}
	h.resumeAt(-1)
	stop = h.run(consumer.Each(effect), byPosition)
	h.wait("at the end", func() bool { return h.position() == 10 })
	require.NoError(t, stop())
	stop = h.run(consumer.Each(effect), byPosition)
	h.produceAs("10", "10")
	h.waitEffects(9)
	require.NoError(t, stop())
	require.Equal(t, "10", h.values()[8])
	require.Equal(t, 10, h.handledFrom())
}

// Property: without claims, a topic whose end was lost never runs again by itself: the partition
// halts and names the command to continue, and the operator's order resets it. Issue A5.
func TestLostEndByPositionNeedsAnOrder(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceAs("0", "0")
	resume := func(c *consumer.Config) {
		c.Dedup, c.OutOfRange = consumer.DedupByPosition, consumer.OutOfRangeResumeEarliest
	}
	stop := h.run(consumer.Each(effect), resume)
	h.waitEffects(1)
	require.NoError(t, stop())
	h.exec(`UPDATE effectonce.consumer_positions SET next_offset = 100`) // as if a hundred had been there
	stop = h.run(consumer.Each(effect), resume)
	h.wait("trouble", func() bool {
		return h.number(`SELECT count(*) FROM effectonce.consumer_positions WHERE trouble LIKE '%lost its end%outbox-relay consumer resume-at --group%'`) == 1
	})
	require.Len(t, h.values(), 1)

	// The consumer runs: a halted partition sees the order, too.
	h.produceAs("1", "1")
	h.resumeAt(1)
	h.waitEffects(2)
	require.NoError(t, stop())
	require.Equal(t, []string{"0", "1"}, h.values())
	require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.consumer_positions WHERE trouble IS NULL AND resume_at IS NULL AND next_offset = 2`))
}

// Property: a partition that is taken over again and again while it runs under load loses no
// message and handles none twice, also without claims: records that were fetched for its earlier
// worker are not handled out of order.
func TestRetakenPartitionLosesAndDoublesNothing(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	c, stop := h.start(kafkatest.Brokers(t), consumer.Each(effect), func(c *consumer.Config) { c.Dedup, c.BatchMax = consumer.DedupByPosition, 7 })
	const rounds, each = 12, 50
	producer := kafkatest.Client(t)
	var want []string
	for round := range rounds {
		for i := range each {
			want = append(want, fmt.Sprint(round*each+i))
			producer.Produce(t.Context(), &kgo.Record{Topic: h.topic, Value: []byte(want[len(want)-1])}, nil)
		}
		h.wait("some of the round", func() bool { return h.position() > round*each })
		consumer.Retake(t.Context(), c, h.topic, 0)
	}
	h.waitEffects(rounds * each)
	require.NoError(t, stop())
	require.Equal(t, want, h.values())
}

// polledHook runs a function in the poll that returns a record, before it returns.
type polledHook func(*kgo.Record)

func (f polledHook) OnFetchRecordUnbuffered(r *kgo.Record, polled bool) {
	if polled {
		f(r)
	}
}

// Property: records that a poll has taken while its partition is moved are not mistaken for the
// next records: nothing in between is skipped.
func TestRecordsInHandAreFetchedAgain(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produce("0", "1", "2")
	polled, moved := make(chan struct{}), make(chan struct{})
	var once sync.Once
	hook := polledHook(func(r *kgo.Record) {
		if r.Offset == 3 {
			once.Do(func() {
				close(polled)
				<-moved
			})
		}
	})
	c, stop := h.startWith(h.pool, []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...), kgo.WithHooks(hook)}, consumer.Each(effect), byPosition)
	h.waitEffects(3)
	h.produce("3")
	<-polled
	h.resumeAt(1)
	consumer.Retake(t.Context(), c, h.topic, 0)
	close(moved)
	h.waitEffects(6)
	require.NoError(t, stop())
	require.Equal(t, []string{"0", "1", "2", "1", "2", "3"}, h.values())
}

// Property: an order to a running partition is carried out when it is taken over again, back and
// forward.
func TestResumeOrderReachesARunningPartition(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produce("0", "1", "2")
	c, stop := h.start(kafkatest.Brokers(t), consumer.Each(effect), byPosition)
	h.waitEffects(3)
	h.resumeAt(1)
	consumer.Retake(t.Context(), c, h.topic, 0)
	h.waitEffects(5)
	h.produce("3")
	h.waitEffects(6)
	require.NoError(t, stop())
	require.Equal(t, []string{"0", "1", "2", "1", "2", "3"}, h.values())
}

// Property: a topic that an operator paused is not consumed, by a consumer that starts or runs,
// while others are, and is when the pause ends.
func TestPausedTopicIsNotConsumed(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	other := kafkatest.Topic(t, 1)
	client := kafkatest.Client(t)
	mark := func(value string) {
		require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: other, Value: []byte(value)}).FirstErr())
	}
	pause := func() {
		h.exec(fmt.Sprintf(`INSERT INTO effectonce.consumer_pauses VALUES ('%[1]s', '%[1]s', 'ops', 'look')`, h.topic))
	}
	h.produce("0")
	pause()
	c, stop := h.start(kafkatest.Brokers(t), consumer.Each(effect), func(c *consumer.Config) { c.Topics = append(c.Topics, other) })
	state := func(want string) {
		h.wait(want, func() bool { return consumer.State(c, h.topic, 0) == want })
	}
	state("paused by an operator")
	mark("other 0")
	h.waitEffects(1)
	require.Equal(t, []string{"other 0"}, h.values())
	h.exec(`DELETE FROM effectonce.consumer_pauses`)
	h.waitEffects(2)
	state("running")

	pause()
	state("paused by an operator")
	h.produce("1")
	consumer.Retake(t.Context(), c, h.topic, 0)
	require.Equal(t, "paused by an operator", consumer.State(c, h.topic, 0))
	mark("other 1")
	h.waitEffects(3)
	h.exec(`DELETE FROM effectonce.consumer_pauses`)
	h.waitEffects(4)
	require.NoError(t, stop())
	require.Equal(t, []string{"other 0", "0", "other 1", "1"}, h.values())
}
