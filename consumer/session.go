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
)

// session is one membership in the group: a client and the partitions that it holds.
type session struct {
	consumer *Consumer
	engine   *engine // the consumer's
	client   *kgo.Client
	ready    chan struct{} // closed when client is set: callbacks can come earlier

	mu         sync.Mutex
	partitions map[topicPartition]*partition
	// assignments are all partitions that Kafka assigned, in work or not.
	assignments map[topicPartition]*assignment
	marks       map[topicPartition]done // to be committed to Kafka
	cluster     string                  // ID of the brokers' cluster
	closing     bool                    // no partition begins any more

	values context.Context //nolint:containedctx // of Run, for handlers: it has no end
	life   context.Context //nolint:containedctx // ends when the session begins to close
	close  context.CancelFunc
	late   chan struct{} // has room for one signal: a partition waits for another attempt
	polls  atomic.Uint64 // that have begun

	committing sync.Mutex
	ends       sync.Mutex // one goroutine takes partitions over or gives them back at a time: see giveBack
	failed     chan error // a partition asks for a new session
	warned     time.Time  // when the poll loop said something last
}

type topicPartition struct {
	topic     string
	partition int32
}

func newSession(c *Consumer) *session {
	s := &session{
		consumer: c, engine: c.engine, ready: make(chan struct{}), late: make(chan struct{}, 1), failed: make(chan error, 1),
		partitions: map[topicPartition]*partition{}, assignments: map[topicPartition]*assignment{}, marks: map[topicPartition]done{},
	}
	s.life, s.close = context.WithCancel(context.Background()) //nolint:forbidigo // it outlives the assignments that wait on it; leave ends it
	return s
}

const (
	// pollMax bounds the records of one poll; what waits for a partition is bounded by pausing it.
	pollMax = 5000
	// markEvery is how often marked offsets are committed to Kafka. They are advisory.
	markEvery = time.Second
	// warnEvery keeps errors that come with each fetch from flooding the log.
	warnEvery = time.Second
	// markMax bounds the last commit of a session, leaveMax its end.
	markMax  = 5 * time.Second
	leaveMax = 5 * time.Second
)

func (s *session) options() []kgo.Opt {
	opts := append([]kgo.Opt{
		kgo.SoftwareNameAndVersion("effectonce-consumer", "v1"),
		// A partition that resumes waits for the fetch that left it out: see waitingBatchesMax.
		kgo.FetchMaxWait(250 * time.Millisecond),
	}, s.consumer.kafka...)
	return append(opts,
		kgo.ConsumerGroup(s.engine.cfg.Group),
		kgo.ConsumeTopics(s.engine.cfg.Topics...),
		// Never the latest record, even by default: what lies between would be lost. Config.Start is
		// resolved when positions are taken over.
		kgo.ConsumeStartOffset(kgo.NewOffset().AtStart()),
		// What is not in the topic any more is judged when positions are taken over: see Config.OutOfRange.
		kgo.ConsumeResetOffset(kgo.NoResetOffset()),
		// The offsets of control records tell a partition that is at its end from one that got stuck.
		kgo.KeepControlRecords(),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		// The session commits by itself: the client's commits carry no metadata.
		kgo.DisableAutoCommit(),
		kgo.BlockRebalanceOnPoll(),
		kgo.AdjustFetchOffsetsFn(s.assigned),
		kgo.OnPartitionsRevoked(s.revoked),
		kgo.OnPartitionsLost(s.lost),
	)
}

// run consumes until ctx ends or a partition asks for a new session.
func (s *session) run(ctx context.Context) error {
	client, err := kgo.NewClient(s.options()...)
	if err != nil {
		return fmt.Errorf("kafka options: %w", err)
	}
	defer s.leave(ctx, client)
	defer s.close()
	s.client, s.values = client, context.WithoutCancel(ctx)
	close(s.ready)
	polling, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var looking sync.WaitGroup
	defer looking.Wait()
	looking.Go(func() { s.lookAfter(polling) })
	looking.Go(func() { s.poll(polling) })
	looking.Go(func() { s.awaitTopics(polling) })
	looking.Go(func() { s.retryLate(polling) })
	looking.Go(func() { s.keepCommitting(polling) })
	looking.Go(func() { s.keepCounting(polling) })
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

// drain gives all partitions back, and says so.
func (s *session) drain(ctx context.Context) {
	e, began := s.engine, time.Now()
	if ctx.Err() != nil {
		s.consumer.enter(PhaseDraining, nil)
	}
	e.cfg.Logger.InfoContext(ctx, "draining: batches in progress may finish", "group", e.cfg.Group, "partitions", len(s.working()), "drain_max", e.cfg.DrainMax.String())
	s.giveBack(context.WithoutCancel(ctx), nil)
	e.cfg.Logger.InfoContext(ctx, "drained: all partitions are given back", "group", e.cfg.Group, "lasted", readable(time.Since(began)))
}

// giveBack ends partitions in good order; nil: all. A stop and a rebalance may come together: whoever is second waits for
// what the first one took. A rebalance that went on meanwhile would have another member begin beside a batch that is still
// under way, and the offset behind that would be forgotten.
func (s *session) giveBack(ctx context.Context, keys map[string][]int32) {
	s.ends.Lock()
	defer s.ends.Unlock()
	s.stop(ctx, s.take(keys), s.engine.cfg.DrainMax)
	s.commitMarks(ctx)
	s.forget(keys)
}

// leave leaves the group. The client first waits for the answer to a JoinGroup, which comes when every other member
// has joined, too, one that froze included: what was consumed is stored, so that is not worth waiting for.
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
		s.engine.cfg.Logger.WarnContext(ctx, "the group rebalances and was not left yet: it takes note of it then, or when the session times out", "group", s.engine.cfg.Group)
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
	fetches.EachError(func(topic string, partition int32, err error) {
		var lost *kgo.ErrDataLoss
		switch {
		case errors.Is(err, kerr.OffsetOutOfRange), errors.As(err, &lost), errors.Is(err, kerr.UnknownTopicID):
			// The last one: the topic was deleted and made anew, which a client takes note of only at its start.
			s.restart(fmt.Errorf("%s/%d: %w", topic, partition, err))
		case !errors.Is(err, context.Canceled) && time.Since(s.warned) > warnEvery:
			s.warned = time.Now()
			s.engine.cfg.Logger.WarnContext(ctx, "fetch failed; it is tried again", "group", s.engine.cfg.Group, "topic", topic, "partition", partition, "error", err)
		}
	})
	fetches.EachPartition(func(fetched kgo.FetchTopicPartition) {
		if len(fetched.Records) == 0 {
			return
		}
		key := topicPartition{fetched.Topic, fetched.Partition}
		s.mu.Lock()
		if a := s.assignments[key]; a != nil {
			a.end = max(a.end, fetched.LastStableOffset)
		}
		p := s.partitions[key]
		s.mu.Unlock()
		// Without a partition it was taken away meanwhile; its next holder fetches the records again.
		switch {
		case p == nil:
		case p.during >= poll:
			// The partition began while this poll was under way: the records may have been fetched before, from
			// elsewhere. They are fetched again.
			s.client.SetOffsets(map[string]map[int32]kgo.EpochOffset{key.topic: {key.partition: {Epoch: -1, Offset: p.queue.begin}}})
		default:
			p.queue.add(fetched.Records)
		}
	})
	s.client.AllowRebalance()
}

// take removes partitions from the session and returns them; nil takes all.
func (s *session) take(keys map[string][]int32) []*partition {
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

// stop ends partitions in good order, and says so in the database: see end.
func (s *session) stop(ctx context.Context, partitions []*partition, limit time.Duration) {
	s.end(ctx, partitions, limit)
	positions := make([]*position, len(partitions))
	for i, p := range partitions {
		positions[i] = p.pos
	}
	if err := s.consumer.giveUp(ctx, positions); err != nil {
		// The next holder takes it for a crash, and is careful.
		s.engine.cfg.Logger.WarnContext(ctx, "partitions were given up, which could not be stored", "group", s.engine.cfg.Group, "error", err)
	}
}

// end ends partitions: none takes another batch, each may finish the one it is at until the limit,
// then its context is cancelled, which rolls back.
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
