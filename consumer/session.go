package consumer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkaclient"
)

// session is one membership in the group: a client and its partitions.
type session struct {
	consumer *Consumer
	engine   *engine // the consumer's
	client   *kgo.Client
	ready    chan struct{} // closed when client is set: callbacks may run earlier

	mu         sync.Mutex
	partitions map[topicPartition]*partition
	// assignments are all partitions that Kafka assigned, whether they run or not.
	assignments map[topicPartition]*assignment
	marks       map[topicPartition]done // to be committed to Kafka
	cluster     string                  // ID of the brokers' cluster
	closing     bool                    // no further partition begins

	values context.Context //nolint:containedctx // Run's values, for handlers; never cancelled
	life   context.Context //nolint:containedctx // ends when the session begins to close
	close  context.CancelFunc
	late   chan struct{} // buffers one signal: a partition waits for another attempt
	polls  atomic.Uint64 // polls begun so far

	committing sync.Mutex
	ends       sync.Mutex                // one goroutine at a time takes over or releases partitions: see giveBack
	failed     chan error                // a partition asks for a new session
	warned     time.Time                 // when the poll loop last logged a warning
	unread     map[topicPartition]damage // places whose records could not be read
	looking    sync.WaitGroup            // goroutines that watch the partitions while the session polls
}

type topicPartition struct {
	topic     string
	partition int32
}

func newSession(c *Consumer) *session {
	s := &session{
		consumer: c, engine: c.engine, ready: make(chan struct{}), late: make(chan struct{}, 1), failed: make(chan error, 1),
		partitions: map[topicPartition]*partition{}, assignments: map[topicPartition]*assignment{}, marks: map[topicPartition]done{},
		unread: map[topicPartition]damage{},
	}
	s.life, s.close = context.WithCancel(context.Background()) //nolint:forbidigo // it outlives the assignments that wait on it; run closes it
	return s
}

const (
	// pollMax bounds the records of one poll. Pausing a partition bounds the records that wait for
	// it.
	pollMax = 5000
	// markEvery is how often marked offsets are committed to Kafka. They are advisory.
	markEvery = time.Second
	// warnEvery limits how often errors that repeat with each fetch are logged.
	warnEvery = time.Second
	// markMax bounds the last commit of a session, leaveMax its end.
	markMax  = 5 * time.Second
	leaveMax = 5 * time.Second
)

func (s *session) options() []kgo.Opt {
	opts := append([]kgo.Opt{
		kgo.SoftwareNameAndVersion("effectonce-consumer", "v1"),
		// A partition that resumes waits for the fetch that excluded it: see waitingBatchesMax.
		kgo.FetchMaxWait(250 * time.Millisecond),
		kgo.MaxDecompressBatchBytes(s.engine.cfg.inflateMax()),
	}, s.consumer.kafka...)
	return append(opts,
		kgo.ConsumerGroup(s.engine.cfg.Group),
		kgo.ConsumeTopics(s.engine.cfg.Topics...),
		// Never start at the latest record, even by default: the records in between would be lost.
		// Config.Start is resolved when positions are taken over.
		kgo.ConsumeStartOffset(kgo.NewOffset().AtStart()),
		// A position that is no longer in the topic is handled at takeover: see Config.OutOfRange.
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

// consume consumes until ctx ends or a partition asks for a new session.
func (s *session) consume(ctx context.Context) error {
	client, err := kafkaclient.New(s.options()...)
	if err != nil {
		return fmt.Errorf("kafka options: %w", err)
	}
	defer s.leave(ctx, client)
	defer s.close()
	s.client, s.values = client, context.WithoutCancel(ctx)
	close(s.ready)
	polling, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	defer s.looking.Wait()
	s.looking.Go(func() { s.lookAfter(polling) })
	s.looking.Go(func() { s.poll(polling) })
	s.looking.Go(func() { s.awaitTopics(polling) })
	s.looking.Go(func() { s.retryLate(polling) })
	s.looking.Go(func() { s.keepCommitting(polling) })
	s.looking.Go(func() { s.keepCounting(polling) })
	go func() {
		select {
		case err := <-s.failed:
			stop(err)
		case <-polling.Done():
		}
	}()
	for polling.Err() == nil {
		s.fetch(polling)
	}
	s.mu.Lock()
	s.closing = true
	s.mu.Unlock()
	s.close()
	s.drain(ctx)
	return context.Cause(polling)
}

// drain releases all partitions, and logs it.
func (s *session) drain(ctx context.Context) {
	e, began := s.engine, time.Now()
	if ctx.Err() != nil {
		s.consumer.enter(PhaseDraining, nil)
	}
	e.cfg.Logger.InfoContext(ctx, "draining: batches in progress may finish", "group", e.cfg.Group, "partitions", len(s.working()), "drain_max", e.cfg.DrainMax.String())
	s.giveBack(context.WithoutCancel(ctx), nil)
	e.cfg.Logger.InfoContext(ctx, "drained: all partitions are released", "group", e.cfg.Group, "lasted", readable(time.Since(began)))
}

// giveBack ends and releases partitions in good order; nil: all. A stop and a rebalance may
// coincide: the second one waits for the partitions that the first one took. If the rebalance did
// not wait, another member would begin while a batch is still in progress, and the offset after
// that batch would not be committed to Kafka.
func (s *session) giveBack(ctx context.Context, keys map[string][]int32) {
	s.ends.Lock()
	defer s.ends.Unlock()
	s.stop(ctx, s.removePartitions(keys), s.engine.cfg.DrainMax)
	s.commitMarks(ctx)
	s.forget(keys)
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
		s.engine.cfg.Logger.WarnContext(ctx, "leaving the group timed out during a rebalance: the group removes this member when the rebalance ends or the session times out", "group", s.engine.cfg.Group)
	}
}

// restart ends the session; the first reason counts.
func (s *session) restart(err error) {
	select {
	case s.failed <- err:
	default:
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
		s.unreadable(ctx, topicPartition{topic, partition}, err)
	case !errors.Is(err, context.Canceled) && time.Since(s.warned) > warnEvery:
		s.warned = time.Now()
		s.engine.cfg.Logger.WarnContext(ctx, "fetch failed; will retry", "group", s.engine.cfg.Group, "topic", topic, "partition", partition, "error", err)
	}
}

// arrived gives the records of a poll to their partition.
func (s *session) arrived(poll uint64, fetched kgo.FetchTopicPartition) {
	key := topicPartition{fetched.Topic, fetched.Partition}
	s.mu.Lock()
	if a := s.assignments[key]; a != nil {
		a.end = max(a.end, fetched.LastStableOffset)
	}
	p := s.partitions[key]
	s.mu.Unlock()
	// If p is nil, the partition was revoked; its next holder fetches the records again.
	switch {
	case p == nil:
	case p.during >= poll:
		// The partition began during this poll: the records may have been fetched before that,
		// from another offset. They are fetched again.
		s.client.SetOffsets(map[string]map[int32]kgo.EpochOffset{key.topic: {key.partition: {Epoch: -1, Offset: p.queue.begin}}})
	default:
		p.queue.add(fetched.Records)
		s.readPast(key, fetched.Records[len(fetched.Records)-1].Offset)
	}
}

// removePartitions removes partitions from the session and returns them; nil takes all.
func (s *session) removePartitions(keys map[string][]int32) []*partition {
	s.mu.Lock()
	defer s.mu.Unlock()
	var taken []*partition
	if keys == nil {
		taken = slices.Collect(maps.Values(s.partitions))
		clear(s.partitions)
		for _, a := range s.assignments {
			a.become(StateDraining, nil)
		}
		return taken
	}
	for topic, numbers := range keys {
		for _, number := range numbers {
			key := topicPartition{topic, number}
			if a := s.assignments[key]; a != nil {
				a.become(StateDraining, nil)
			}
			if p := s.partitions[key]; p != nil {
				taken = append(taken, p)
				delete(s.partitions, key)
			}
		}
	}
	return taken
}

// stop ends partitions in good order, and stores that they were released: see end.
func (s *session) stop(ctx context.Context, partitions []*partition, limit time.Duration) {
	s.end(ctx, partitions, limit)
	positions := make([]*position, len(partitions))
	for i, p := range partitions {
		positions[i] = p.pos
	}
	if err := s.consumer.giveUp(ctx, positions); err != nil {
		// The next holder treats this as a crash and handles messages alone at first: see careful.
		s.engine.cfg.Logger.WarnContext(ctx, "could not store the release of partitions", "group", s.engine.cfg.Group, "error", err)
	}
}

// end ends partitions: none begins another batch. Each may finish its current batch until the
// limit; then its context is cancelled, which rolls the batch back.
func (s *session) end(ctx context.Context, partitions []*partition, limit time.Duration) {
	for _, p := range partitions {
		p.stop()
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for _, p := range partitions {
		select {
		case <-p.done:
		case <-ctx.Done():
			p.cancel()
			<-p.done
		}
	}
}
