package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/testwait"
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
			for i := range records {
				records[i] = &kgo.Record{Value: []byte(fmt.Sprint(i)), Headers: newID()}
			}
			h.produceRecords(records...)
			settings := func(c *consumer.Config) { c.BatchMax, c.Order = 1, order }
			slow := consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
				if _, err := tx.Exec(ctx, `SELECT pg_sleep(0.02)`); err != nil { // there is work for as long as the test observes
					return err
				}
				return effect(ctx, tx, msg)
			})
			stop := h.run(slow, settings)
			h.wait("the first holder works", func() bool { return h.number(`SELECT count(*) FROM effects`) > 10 })
			other := h.make(slow, settings)
			const epochs = `SELECT max(epoch) FROM effectonce.consumer_positions`
			before, begun := h.number(epochs), time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			for ctx.Err() == nil {
				_, _ = other.Deliver(ctx, records...) // ends when it is refused
				select {
				case <-ctx.Done():
				case <-time.After(time.Second):
				}
			}
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
	h, fake := newFaked(t, 1)
	var refused, joined atomic.Int64
	answer(fake, func(commit *kmsg.OffsetCommitRequest) kmsg.Response {
		if refused.Add(1) > 1 {
			return nil
		}
		response, _ := commit.ResponseKind().(*kmsg.OffsetCommitResponse)
		for _, topic := range commit.Topics {
			of := kmsg.NewOffsetCommitResponseTopic()
			of.Topic, of.TopicID = topic.Topic, topic.TopicID
			for _, partition := range topic.Partitions {
				p := kmsg.NewOffsetCommitResponseTopicPartition()
				p.Partition, p.ErrorCode = partition.Partition, kerr.StaleMemberEpoch.Code
				of.Partitions = append(of.Partitions, p)
			}
			response.Topics = append(response.Topics, of)
		}
		return response
	})
	answer(fake, func(*kmsg.JoinGroupRequest) kmsg.Response {
		joined.Add(1)
		return nil
	})
	h.produce("0")
	stop := h.run(consumer.Each(effect), nil)
	h.waitEffects(1)
	h.wait("it is refused", func() bool { return refused.Load() > 0 })
	before := joined.Load()
	testwait.Equal(t, 1, "the group's offset", h.committed)
	require.Equal(t, before, joined.Load(), "it did not join again")
	require.NoError(t, stop())
}

// Property: a running consumer follows the database back. A failover that loses commits is noticed
// with the next message; one that also loses the takeover of the partition is noticed even if no
// further message arrives. Row C32 of guarantees.md.
func TestRunningConsumerFollowsTheDatabaseBack(t *testing.T) {
	t.Parallel()
	each(t, map[string]int{"commits": 0, "commits and the takeover": 1}, func(t *testing.T, h *harness, _ string, epochs int) {
		t.Helper()
		h.produce(numbered(10)...)
		stop := h.run(consumer.Each(effect), nil)
		h.waitEffects(10)
		h.exec(fmt.Sprintf(`WITH lost AS (DELETE FROM effects WHERE n > 4 RETURNING message_id), unclaimed AS (
			DELETE FROM effectonce.processed_messages WHERE message_id IN (SELECT message_id FROM lost))
			UPDATE effectonce.consumer_positions SET next_offset = 4, epoch = epoch - %d`, epochs))
		want := 10
		if epochs == 0 {
			h.produceAs("10", "10")
			want = 11
		}
		h.untilEffects(want, stop)
		require.Contains(t, h.log.String(), "lost commits")
	})
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
// it, in the log and in the database, and continues with the remaining records only if an operator
// orders that. Row C34 of guarantees.md.
func TestDeletedRecordsHaltThePartition(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 2)
	h.produce("0", "1", "2", "3", "4")
	h.untilEffects(5, h.run(consumer.Each(effect), func(c *consumer.Config) { c.BatchMax = 1 }))
	h.produce("5", "6", "7")
	deleteRecords(t, h.topic, 7)

	stop := h.run(consumer.Each(effect), nil)
	h.waitNumber(1, `SELECT count(*) FROM effectonce.consumer_positions WHERE trouble LIKE '%records 5 to 6 %were deleted%resume-at --group%'`)
	h.wait("said", func() bool { return strings.Contains(h.log.String(), "partition halts") })
	require.NoError(t, stop())
	require.Len(t, h.values(), 5)

	h.resumeAt(-2)
	stop = h.run(consumer.Each(effect), nil)
	h.waitEffects(6)
	h.untilHandled(8, stop)
	require.Equal(t, "7", h.values()[5])
	require.Zero(t, h.number(`SELECT count(*) FROM effectonce.consumer_positions WHERE trouble IS NOT NULL`))
}

// Property: if Kafka lost the end of the topic, new records at old offsets are neither skipped nor
// handled by themselves: the partition halts and names the command to continue, and follows the
// operator's order while it runs. Row C34 of guarantees.md.
func TestLostEndHaltsThePartition(t *testing.T) {
	t.Parallel()
	bothModes(t, "claims", func(t *testing.T, claims bool) {
		t.Helper()
		h := newHarness(t, 1)
		change := byPosition
		if claims {
			change = nil
		}
		h.produceAs("0", "0")
		h.untilEffects(1, h.run(consumer.Each(effect), change))
		h.exec(`UPDATE effectonce.consumer_positions SET next_offset = 100`) // as if a hundred had been there
		stop := h.run(consumer.Each(effect), change)
		h.waitNumber(1, `SELECT count(*) FROM effectonce.consumer_positions WHERE trouble LIKE '%lost its end%outbox-relay consumer resume-at --group%'`)
		require.Len(t, h.values(), 1)

		h.produceAs("1", "1")
		h.resumeAt(1)
		h.untilEffects(2, stop)
		require.Equal(t, []string{"0", "1"}, h.values())
		require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.consumer_positions WHERE trouble IS NULL AND resume_at IS NULL AND next_offset = 2`))
	})
}

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
	h.produce(numbered(6)...)
	// The commit of another program, which is behind the order.
	h.rewind(0, "")
	h.untilEffects(6, h.run(consumer.Each(effect), byPosition))

	h.resumeAt(4)
	h.untilEffects(8, h.run(consumer.Each(effect), byPosition))
	require.Equal(t, []string{"4", "5"}, h.values()[6:])
	require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.consumer_positions WHERE resume_at IS NULL AND next_offset = 6 AND handled_from = 0`))

	h.produce("6", "7", "8", "9")
	h.resumeAt(-1)
	h.untilHandled(10, h.run(consumer.Each(effect), byPosition))
	stop := h.run(consumer.Each(effect), byPosition)
	h.produceAs("10", "10")
	h.untilEffects(9, stop)
	require.Equal(t, "10", h.values()[8])
	require.Equal(t, 10, h.handledFrom())
}

// Property: a partition that is taken over again and again while it runs under load loses no
// message and handles none twice, also without claims: records that were fetched for its earlier
// worker are not handled out of order.
func TestRetakenPartitionLosesAndDoublesNothing(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	c, stop := h.start(consumer.Each(effect), func(c *consumer.Config) {
		c.Dedup, c.BatchMax, c.Logger = consumer.DedupByPosition, 7, slog.New(slog.NewTextHandler(slowLog{h.log}, nil))
	})
	const rounds, each = 12, 400
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
	h.untilEffects(rounds*each, stop)
	require.Equal(t, want, h.values())
}

// slowLog takes its time for a line.
type slowLog struct{ *logLines }

func (l slowLog) Write(p []byte) (int, error) {
	time.Sleep(30 * time.Millisecond) //nolint:forbidigo // it is what makes the log slow
	return l.logLines.Write(p)
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
	h.kafka = []kgo.Opt{kgo.WithHooks(hook)}
	c, stop := h.start(consumer.Each(effect), byPosition)
	h.waitEffects(3)
	h.produce("3")
	<-polled
	h.resumeAt(1)
	consumer.Retake(t.Context(), c, h.topic, 0)
	close(moved)
	h.untilEffects(6, stop)
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
	c, stop := h.start(consumer.Each(effect), func(c *consumer.Config) { c.Topics = append(c.Topics, other) })
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
	h.untilEffects(4, stop)
	require.Equal(t, []string{"other 0", "0", "other 1", "1"}, h.values())
}

// Property: a consumer whose group left messages waiting under another name does not start: it would not
// retry them, and would handle later messages of their keys first.
func TestOtherNameWaitsForWhatIsLeft(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceKeyed("k:bad", "k:1")
	var fine atomic.Bool
	handler := failingWith(consumer.RetryAfter(2*time.Second, errBad), &fine)
	stop := h.run(handler, nil)
	h.wait("parked", func() bool { return len(h.parked()) == 2 })
	require.NoError(t, stop())
	renamed := func(c *consumer.Config) { c.Name = "renamed-" + h.topic }
	require.ErrorContains(t, h.make(handler, renamed).Run(t.Context()), h.topic+"/"+h.topic)
	fine.Store(true)
	h.untilEffects(2, h.run(handler, nil))
	h.produceKeyed("k:2")
	h.untilEffects(3, h.run(handler, renamed))
	require.Equal(t, []string{"k:bad", "k:1", "k:2"}, h.values())
}

// Property: a position beyond the end of the topic, as Kafka said it before the position was locked, is no
// loss if its holder had advanced meanwhile; if the topic still ends there, the partition halts. Row C34.
func TestHolderThatAdvancesMeanwhileIsNoLossOfTheEnd(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	e := consumer.NewEngine(t, h.pool, consumer.Each(effect), consumer.Config{Group: h.topic, Topics: []string{h.topic}})
	require.NoError(t, e.ApplyAll(t.Context(), 0, 0, 7, 7))
	at, halt, err := e.HoldAt(t.Context(), 0, 5, 9)
	require.NoError(t, errors.Join(halt, err))
	require.EqualValues(t, 7, at)
	_, halt, err = e.HoldAt(t.Context(), 0, 5, 5)
	require.NoError(t, err)
	require.ErrorContains(t, halt, "ends at offset 5, but was consumed up to 7")
}

// Property: a stop that interrupts an acquisition waits for its answer, so that the partition is released:
// otherwise its next holder would try messages alone that were not begun. Row C11 of guarantees.md.
func TestStoppedAcquisitionIsAnswered(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	e := consumer.NewEngine(t, h.pool, consumer.Each(effect), consumer.Config{Group: h.topic, Topics: []string{h.topic}})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := e.Hold(ctx, 0)
	require.NoError(t, err)
	locked, err := h.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = locked.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = locked.Exec(t.Context(), `SELECT FROM effectonce.consumer_positions FOR UPDATE`)
	require.NoError(t, err)
	_, err = e.Hold(ctx, 0)
	require.ErrorIs(t, err, context.Canceled, "not for long")
}
