package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
)

// latest begins at the end of topics.
func latest(c *consumer.Config) { c.Start = consumer.StartLatest }

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
	client := kafkatest.Client(h.t, kgo.RecordPartitioner(kgo.ManualPartitioner()))
	defer client.Close()
	h.wait("written to a partition", func() bool {
		return client.ProduceSync(h.t.Context(), &kgo.Record{Topic: h.topic, Partition: partition, Value: []byte(value)}).FirstErr() == nil
	})
}

// recreate deletes the topic and creates it again.
func (h *harness) recreate() {
	h.t.Helper()
	admin := kadm.NewClient(kafkatest.Client(h.t))
	deleted, err := admin.DeleteTopic(h.t.Context(), h.topic)
	require.NoError(h.t, errors.Join(err, deleted.Err))
	h.wait("made anew", func() bool {
		made, err := admin.CreateTopic(h.t.Context(), 1, 1, nil, h.topic)
		return err == nil && made.Err == nil
	})
}

// handledFrom is the begin of the handled range of partition 0.
func (h *harness) handledFrom() int {
	h.t.Helper()
	return h.number(`SELECT handled_from FROM effectonce.consumer_positions WHERE topic = $1 AND partition = 0`, h.topic)
}

// resumeAt orders, as an operator does, where a partition resumes.
func (h *harness) resumeAt(at int64) {
	h.t.Helper()
	tag, err := h.pool.Exec(h.t.Context(), `UPDATE effectonce.consumer_positions SET resume_at = $2 WHERE topic = $1 AND partition = 0`, h.topic, at)
	require.NoError(h.t, err)
	require.EqualValues(h.t, 1, tag.RowsAffected())
}

// Property: messages that StartLatest skipped do not count as handled: a rewind handles them. Issue
// A4.
func TestRewindAfterStartLatestMakesUp(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produce("0", "1", "2")
	stop := h.run(consumer.Each(effect), latest)
	h.wait("position", func() bool { return h.position() == 3 })
	h.produce("3")
	h.waitEffects(1)
	require.NoError(t, stop())
	require.Equal(t, 3, h.handledFrom())
	h.rewind(0, "")
	stop = h.run(consumer.Each(effect), latest)
	h.waitEffects(4)
	require.NoError(t, stop())
	require.Equal(t, []string{"3", "0", "1", "2"}, h.values())
	require.Equal(t, 4, h.position(), "a position never goes back by itself")
}

// Property: an interrupted rewind continues where it was, and when it is finished its messages
// count as handled. Issue A4.
func TestInterruptedRewindGoesOn(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produce("0", "1", "2", "3", "4", "5")
	stop := h.run(consumer.Each(effect), latest)
	h.wait("position", func() bool { return h.position() == 6 })
	h.produce("6")
	h.waitEffects(1)
	require.NoError(t, stop())
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
	require.Equal(t, 6, h.handledFrom())
	stop = h.run(consumer.Each(effect), nil)
	h.waitEffects(6)
	require.Contains(t, h.log.String(), "an earlier rewind that is not finished")
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
	stop := h.run(consumer.Each(effect), nil)
	h.waitEffects(4)
	require.NoError(t, stop())
	id, cluster := h.topicID()
	h.rewind(2, consumer.CommitMetadata(cluster, id, 2)) // as if the last commit had not arrived
	renamed := func(c *consumer.Config) { c.Name = h.topic + "-renamed" }
	stop = h.run(consumer.Each(effect), renamed)
	h.wait("taken over", func() bool { return h.handledFrom() == 4 })
	h.produce("4")
	h.waitEffects(5)
	require.NoError(t, stop())
	require.Contains(t, h.log.String(), "lags behind")
	h.rewind(1, "")
	stop = h.run(consumer.Each(effect), renamed)
	h.waitEffects(8)
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

// Property: with StartLatest, partitions that are added after the group's first contact begin at
// their start, and so does a recreated topic: the group was subscribed when their first records
// came. Issue A6.
func TestLatestLosesNothingThatComesLater(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceTo(0, "before")
	stop := h.run(consumer.Each(effect), latest)
	h.wait("position", func() bool { return h.position() == 1 })
	require.NoError(t, stop())
	added, err := kadm.NewClient(kafkatest.Client(t)).UpdatePartitions(t.Context(), 2, h.topic)
	require.NoError(t, errors.Join(err, added.Error()))
	h.produceTo(1, "added")
	h.produceTo(0, "after")
	stop = h.run(consumer.Each(effect), latest)
	h.waitEffects(2)
	require.NoError(t, stop())
	require.ElementsMatch(t, []string{"added", "after"}, h.values())

	h.recreate()
	h.produceTo(0, "anew")
	stop = h.run(consumer.Each(effect), latest)
	h.waitEffects(3)
	require.NoError(t, stop())
}

// Property: consumers that make first contact with a topic together, while it is written to and
// partitions are added, agree on where all its partitions begin. A partition that only one of them
// sees is an added partition. Issue A6.
func TestReplicasThatMeetATopicTogetherAgree(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	const replicas = 6
	begins := make([][]int64, replicas)
	var group sync.WaitGroup
	for i := range replicas {
		engine := consumer.NewEngine(t, h.pool, consumer.Each(effect), consumer.Config{Group: "g", Topics: []string{h.topic}, Start: consumer.StartLatest})
		group.Go(func() {
			ends := []int64{int64(10 + i), int64(20 + i), int64(30 + i), int64(40 + i)}[:3+i%2]
			var err error
			begins[i], err = engine.Meet(t.Context(), h.topic, ends...)
			if err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	met := h.number(`SELECT partitions FROM effectonce.consumer_topics`)
	first := begins[0][0]
	for _, at := range begins {
		for number, begin := range at {
			want := first + 10*int64(number)
			if number >= met {
				want = 0
			}
			require.Equal(t, want, begin, "partition %d of %v, met with %d partitions", number, begins, met)
		}
	}
}

// Property: offsets that were translated for a topic with another ID are where the group continues;
// those that this group committed itself, for an earlier topic of the same name in the same
// cluster, are not. Issue A7.
func TestCommittedOffsetsOfAnotherTopicID(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		metadata func(cluster string, earlier uuid.UUID) string
		want     []string
	}{
		"translated":      {func(_ string, id uuid.UUID) string { return consumer.CommitMetadata("the other cluster", id, 7) }, []string{"b3", "b4"}},
		"by another tool": {func(string, uuid.UUID) string { return "" }, []string{"b3", "b4"}},
		"our own": {
			func(cluster string, id uuid.UUID) string { return consumer.CommitMetadata(cluster, id, 3) },
			[]string{"b0", "b1", "b2", "b3", "b4"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			h.produce("a0", "a1", "a2")
			stop := h.run(consumer.Each(effect), nil)
			h.waitEffects(3)
			require.NoError(t, stop())
			earlier, cluster := h.topicID()
			h.recreate()
			h.produce("b0", "b1", "b2", "b3", "b4")
			h.rewind(3, c.metadata(cluster, earlier))
			stop = h.run(consumer.Each(effect), nil)
			h.wait("position", func() bool { return h.position() == 5 })
			require.NoError(t, stop())
			require.Equal(t, c.want, h.values()[3:])
			require.Contains(t, h.log.String(), "Kafka's offset")
		})
	}
}

// Property: the consumer's own commits name the cluster and topic that they are for, and the line
// that is logged when a partition is assigned says in plain numbers where it begins and why. Issues
// A7, E.
func TestCommitsAndAssignmentsSayWhatTheyAreFor(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produce("0", "1")
	stop := h.run(consumer.Each(effect), nil)
	h.waitEffects(2)
	require.NoError(t, stop())
	id, cluster := h.topicID()
	offsets, err := kadm.NewClient(kafkatest.Client(t)).FetchOffsets(t.Context(), h.topic)
	require.NoError(t, err)
	found, _ := offsets.Lookup(h.topic, 0)
	require.EqualValues(t, 2, found.At)
	require.Equal(t, fmt.Sprintf("effectonce/1 cluster=%s topic=%s offset=2", cluster, id), found.Metadata)
	require.Contains(t, h.log.String(), `resume=0 why="the topic is new to the group: begins at its start" position=none committed=none first=0 end=`)
	stop = h.run(consumer.Each(effect), nil)
	h.wait("assigned", func() bool {
		return strings.Contains(h.log.String(), `resume=2 why="resumes at the stored position" position=2 committed=2`)
	})
	require.NoError(t, stop())
	require.NotContains(t, h.log.String(), "0x")
}

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

// start is run for brokers of the test's own. It returns the consumer, too.
func (h *harness) start(brokers []string, handler consumer.Handler, change func(*consumer.Config)) (c *consumer.Consumer, stop func() error) {
	h.t.Helper()
	return h.startWith(h.pool, []kgo.Opt{kgo.SeedBrokers(brokers...)}, handler, change)
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
