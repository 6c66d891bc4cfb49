package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkaclient"
	"github.com/effectonce/effectonce/internal/say"
)

// session is one membership in the group: a client and the partitions that Kafka assigned to it.
type session struct {
	consumer *Consumer
	client   *kgo.Client
	ready    chan struct{} // closed when client is set: callbacks may run earlier

	mu          sync.Mutex
	assignments map[topicPartition]*assignment
	cluster     string // ID of the brokers' cluster

	values  context.Context         //nolint:containedctx // Run's values, for handlers; never cancelled
	life    context.Context         //nolint:containedctx // ends when the session begins to close: no further partition begins
	restart context.CancelCauseFunc // ends it, so that a new session begins; the first reason counts
	polls   atomic.Uint64           // polls begun so far

	assigning  sync.Mutex     // one goroutine at a time acquires or releases partitions: see release
	committing sync.Mutex     // the same for commits to Kafka
	said       say.Lines      // what repeats
	looking    sync.WaitGroup // goroutines that look after the partitions while the session polls
}

type topicPartition struct {
	topic     string
	partition int32
}

func newSession(ctx context.Context, c *Consumer) *session {
	s := &session{consumer: c, ready: make(chan struct{}), values: context.WithoutCancel(ctx), assignments: map[topicPartition]*assignment{}}
	s.life, s.restart = context.WithCancelCause(ctx)
	return s
}

const (
	// pollMax bounds the records of one poll. Pausing a partition bounds the records that wait for
	// it.
	pollMax = 5000
	// markMax bounds a commit to Kafka, leaveMax the end of a session.
	markMax  = 5 * time.Second
	leaveMax = 5 * time.Second
	// againDrainMax bounds how long a rebalance may wait for a partition that is acquired again.
	againDrainMax = 5 * time.Second
)

func (s *session) options() []kgo.Opt {
	opts := append([]kgo.Opt{
		kgo.SoftwareNameAndVersion("effectonce-consumer", "v1"),
		// A partition that resumes waits for the fetch that excluded it: see waitingBatchesMax.
		kgo.FetchMaxWait(250 * time.Millisecond),
		kgo.MaxDecompressBatchBytes(s.consumer.cfg.inflateMax()),
	}, s.consumer.kafka...)
	return append(opts,
		kgo.ConsumerGroup(s.consumer.cfg.Group),
		kgo.ConsumeTopics(s.consumer.cfg.Topics...),
		// Never start at the latest record, even by default: the records in between would be lost.
		kgo.ConsumeStartOffset(kgo.NewOffset().AtStart()),
		// A position that is no longer in the topic halts then.
		kgo.ConsumeResetOffset(kgo.NoResetOffset()),
		// The offsets of control records distinguish a partition that reached its end from one that
		// is stuck.
		kgo.KeepControlRecords(),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		// The session commits offsets itself: the client's commits carry no metadata.
		kgo.DisableAutoCommit(),
		kgo.BlockRebalanceOnPoll(),
		kgo.AdjustFetchOffsetsFn(s.assigned),
		kgo.OnPartitionsRevoked(s.revoked),
		kgo.OnPartitionsLost(s.lost),
	)
}

// consume consumes until Run's context ends or a new session must begin.
func (s *session) consume(ctx context.Context) error {
	defer s.restart(nil)
	client, err := kafkaclient.New(s.options()...)
	if err != nil {
		return fmt.Errorf("kafka options: %w", err)
	}
	defer s.leave(ctx, client)
	s.client = client
	close(s.ready)
	defer s.looking.Wait()
	s.looking.Go(func() { s.watch(s.life) })
	for s.life.Err() == nil {
		s.fetch(s.life) //nolint:contextcheck // it is derived from ctx
	}
	s.drain(ctx)
	return context.Cause(s.life) //nolint:contextcheck // as above
}

// drain releases all partitions, and logs it.
func (s *session) drain(ctx context.Context) {
	e, began := s.consumer, time.Now()
	if ctx.Err() != nil {
		s.consumer.enter(PhaseDraining, nil)
	}
	e.cfg.Logger.InfoContext(ctx, "draining: batches in progress may finish", "group", e.cfg.Group, "partitions", len(s.working()), "drain_max", e.cfg.DrainMax.String())
	s.release(context.WithoutCancel(ctx), nil, e.cfg.DrainMax)
	e.cfg.Logger.InfoContext(ctx, "drained: all partitions are released", "group", e.cfg.Group, "lasted", readable(time.Since(began)))
}

// leave leaves the group. The client first waits for the answer to a JoinGroup. That answer arrives
// only after every other member has joined, including one that froze. What was consumed is stored,
// so the wait is bounded by leaveMax.
func (s *session) leave(ctx context.Context, client *kgo.Client) {
	left := make(chan struct{})
	go func() {
		defer close(left)
		client.CloseAllowingRebalance()
	}()
	timer := time.NewTimer(leaveMax)
	defer timer.Stop()
	select {
	case <-left:
	case <-timer.C:
		s.consumer.cfg.Logger.WarnContext(ctx, "leaving the group timed out during a rebalance: the group removes this member when the rebalance ends or the session times out", "group", s.consumer.cfg.Group)
	}
}

func (s *session) fetch(ctx context.Context) {
	poll := s.polls.Add(1)
	fetches := s.client.PollRecords(ctx, pollMax)
	fetches.EachPartition(func(fetched kgo.FetchTopicPartition) {
		if len(fetched.Records) > 0 {
			s.arrived(poll, fetched)
		}
		if fetched.Err != nil {
			s.fetchFailed(ctx, fetched) // after its records, which come before the damaged ones
		}
	})
	s.client.AllowRebalance()
}

// fetchFailed handles the error of a partition's fetch. The client retries what is only logged.
func (s *session) fetchFailed(ctx context.Context, fetched kgo.FetchTopicPartition) {
	topic, partition, err := fetched.Topic, fetched.Partition, fetched.Err
	var lost *kgo.ErrDataLoss
	switch {
	case errors.Is(err, kerr.OffsetOutOfRange), errors.As(err, &lost), errors.Is(err, kerr.UnknownTopicID):
		// UnknownTopicID: the topic was deleted and recreated, which a client detects only when
		// it starts.
		s.restart(fmt.Errorf("%s/%d: %w", topic, partition, err))
	case isUnreadable(fetched):
		s.unreadable(topicPartition{topic, partition}, err)
	case !errors.Is(err, context.Canceled):
		if times, due := s.said.Due("fetch", false); due {
			s.consumer.cfg.Logger.WarnContext(ctx, "fetch failed; will retry", "group", s.consumer.cfg.Group, "topic", topic, "partition", partition, "error", err, "times", times)
		}
	}
}

// arrived gives the records of a poll to their partition.
func (s *session) arrived(poll uint64, fetched kgo.FetchTopicPartition) {
	key := topicPartition{fetched.Topic, fetched.Partition}
	s.mu.Lock()
	var p *partition
	if a := s.assignments[key]; a != nil {
		p, a.end = a.p, max(a.end, fetched.LastStableOffset)
	}
	s.mu.Unlock()
	switch {
	case p == nil:
		// The partition was revoked, or is being acquired: then it is paused, and its first records
		// are fetched after that.
	case p.during >= poll:
		// The partition began during this poll: the records may have been fetched before that,
		// from another offset. They are fetched again.
		s.setOffset(key, p.backlog.begin)
	default:
		p.backlog.arrive(fetched.Records, p.messages)
	}
}

// setOffset drops everything that the client fetched of a partition, except what a running poll has
// already taken, and fetches from an offset. No leader epoch: the client would check for truncation
// against an epoch that belongs to another offset.
func (s *session) setOffset(key topicPartition, offset int64) {
	s.client.SetOffsets(map[string]map[int32]kgo.EpochOffset{key.topic: {key.partition: {Epoch: -1, Offset: offset}}})
}

func (s *session) pauseFetching(keys []topicPartition) {
	list := map[string][]int32{}
	for _, key := range keys {
		list[key.topic] = append(list[key.topic], key.partition)
	}
	s.client.PauseFetchPartitions(list)
}

// assigned is called by the client between the assignment of partitions and their first fetch. It
// acquires them and returns where they resume: see decideStart. ctx ends with the assignment. A
// partition that cannot be acquired yet is paused, and acquired later.
func (s *session) assigned(ctx context.Context, offsets map[string]map[int32]kgo.Offset) (map[string]map[int32]kgo.Offset, error) {
	select {
	case <-s.ready:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	var keys []topicPartition
	s.mu.Lock()
	for topic, numbers := range offsets {
		for number := range numbers {
			key := topicPartition{topic, number}
			keys = append(keys, key)
			a := s.assignments[key]
			if a == nil {
				a = &assignment{key: key}
				s.assignments[key] = a
			}
			a.reached, a.end, a.mark = -1, -1, -1
			a.does.become(StateWaiting, nil)
		}
	}
	s.mu.Unlock()
	begins := s.acquire(ctx, "", keys...)
	if ctx.Err() != nil && s.life.Err() == nil {
		return nil, ctx.Err()
	}
	for key, offset := range begins {
		// An offset and not "the start", even if the partition waits: the client tracks a partition
		// only once it has an offset, and setOffset moves it.
		offsets[key.topic][key.partition] = kgo.NewOffset().At(offset)
	}
	return offsets, nil
}

// revoked waits, for a bounded time, until the partitions have finished or rolled back their batch.
// It commits the offsets before another member gets the partitions.
func (s *session) revoked(ctx context.Context, _ *kgo.Client, keys map[string][]int32) {
	if len(keys) == 0 {
		return
	}
	e, began := s.consumer, time.Now()
	s.release(ctx, keys, e.cfg.DrainMax)
	if s.life.Err() != nil {
		return // drain logs it
	}
	e.cfg.Logger.InfoContext(ctx, "partitions were revoked and are released", "group", e.cfg.Group, "partitions", keys, "lasted", readable(time.Since(began)))
}

// lost stops at once: another member already holds the partitions. If a transaction still commits
// late, its claims show that. The epoch of the position refuses the rest.
func (s *session) lost(ctx context.Context, _ *kgo.Client, keys map[string][]int32) {
	if len(keys) == 0 {
		return
	}
	s.consumer.cfg.Logger.WarnContext(ctx, "partitions were lost: this consumer was away for longer than its session", "group", s.consumer.cfg.Group, "partitions", keys)
	s.release(ctx, keys, 0)
}

// release ends and releases partitions in good order; nil: all. A stop and a rebalance may coincide:
// the second one waits for the partitions that the first one took. If the rebalance did not wait,
// another member would begin while a batch is still in progress, and the offset after that batch
// would not be committed to Kafka.
func (s *session) release(ctx context.Context, keys map[string][]int32, limit time.Duration) {
	s.assigning.Lock()
	defer s.assigning.Unlock()
	released := map[topicPartition]*assignment{}
	var workers []*partition
	s.mu.Lock()
	for key, a := range s.assignments {
		if keys != nil && !slices.Contains(keys[key.topic], key.partition) {
			continue
		}
		released[key] = a
		a.does.become(StateDraining, nil)
		if a.p != nil {
			workers = append(workers, a.p)
			a.p = nil
		}
	}
	s.mu.Unlock()
	s.stop(ctx, workers, limit)
	if limit > 0 {
		if err := s.commitMarks(ctx); err != nil {
			s.consumer.cfg.Logger.WarnContext(ctx, "could not commit offsets to Kafka; the database has the position", "group", s.consumer.cfg.Group, "error", err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, a := range released {
		if s.assignments[key] == a {
			delete(s.assignments, key)
		}
	}
}

// stop ends partitions: none begins another batch. Each may finish its current batch until the
// limit; then its context is cancelled, which rolls the batch back. What a partition waits for then
// is bounded, and all wait at the same time. It stores that the partitions were released.
func (s *session) stop(ctx context.Context, partitions []*partition, limit time.Duration) {
	for _, p := range partitions {
		p.stop()
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for _, p := range partitions {
		select {
		case <-p.done:
		case <-limited.Done():
		}
	}
	for _, p := range partitions {
		p.cancel()
	}
	var positions []*position
	for _, p := range partitions {
		if <-p.done; !p.unclean.Load() {
			positions = append(positions, p.pos)
		}
	}
	if err := s.consumer.giveUp(ctx, positions); err != nil {
		// The next holder treats this as a crash: see suspects.
		s.consumer.cfg.Logger.WarnContext(ctx, "could not store the release of partitions", "group", s.consumer.cfg.Group, "error", err)
	}
}

// giveUp stores that positions are released in good order.
func (c *Consumer) giveUp(ctx context.Context, positions []*position) error {
	if len(positions) == 0 {
		return nil
	}
	topics, numbers, epochs := make([]string, len(positions)), make([]int32, len(positions)), make([]int64, len(positions))
	for i, pos := range positions {
		topics[i], numbers[i], epochs[i] = pos.topic, pos.partition, pos.epoch
	}
	ctx, cancel := context.WithTimeout(ctx, markMax)
	defer cancel()
	if _, err := c.pool.Exec(ctx, c.sql[givenUpSQL], c.cfg.Group, topics, numbers, epochs); err != nil {
		return fmt.Errorf("release positions: %w", err)
	}
	return nil
}
