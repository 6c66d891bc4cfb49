package consumer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// assigned is called by the client between the assignment of partitions and their first fetch. It takes them
// over and answers where they resume: see decideStart.
//
// ctx ends when the assignment does. While the database or the brokers are away the assignment waits; a single
// partition without an answer waits alone.
func (s *session) assigned(ctx context.Context, offsets map[string]map[int32]kgo.Offset) (map[string]map[int32]kgo.Offset, error) {
	select {
	case <-s.ready:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)() //nolint:contextcheck // either may end first
	for attempt := 1; ; attempt++ {
		if s.isClosing() {
			return offsets, nil // nothing begins any more: the next holder should not take it for a crash
		}
		resumed, err := s.begin(ctx, offsets)
		if err == nil {
			return resumed, nil
		}
		if ctx.Err() != nil && !s.isClosing() {
			return nil, err
		}
		s.noteWaiting(offsets, err)
		wait := s.engine.backoff(attempt)
		s.engine.cfg.Logger.WarnContext(ctx, "positions could not be taken over; the partitions wait", "group", s.engine.cfg.Group, "error", err, "retry_in", readable(wait))
		pause(ctx, wait)
	}
}

// takeOverMax bounds one attempt, so that a request that hangs is given up and said.
const takeOverMax = 15 * time.Second

func (s *session) isClosing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closing
}

// begin takes over what was assigned and starts the workers.
func (s *session) begin(ctx context.Context, offsets map[string]map[int32]kgo.Offset) (map[string]map[int32]kgo.Offset, error) {
	s.ends.Lock()
	defer s.ends.Unlock()
	resumed := map[string]map[int32]kgo.Offset{}
	var keys []topicPartition
	for topic, numbers := range offsets {
		resumed[topic] = map[int32]kgo.Offset{}
		for number := range numbers {
			keys = append(keys, topicPartition{topic, number})
		}
	}
	if len(keys) == 0 {
		return resumed, nil
	}
	slices.SortFunc(keys, topicPartition.compare)
	s.assign(keys)
	limited, cancel := context.WithTimeout(ctx, takeOverMax)
	defer cancel()
	taken, err := s.takeOver(limited, keys)
	if err != nil {
		return nil, err
	}
	for _, key := range keys {
		// Without the leader epoch: the client would look for truncation against an epoch that belongs to
		// another offset. An offset, and not "the start", also where the partition is paused and has to wait:
		// the client knows a partition from its offset, and retake moves it.
		resumed[key.topic][key.partition] = kgo.NewOffset().At(s.start(ctx, key, taken[key], 0))
	}
	return resumed, nil
}

// assign notes that partitions are assigned, and ends workers that may be left from an earlier assignment.
func (s *session) assign(keys []topicPartition) {
	for _, key := range keys {
		s.mu.Lock()
		p := s.partitions[key]
		delete(s.partitions, key)
		s.assignOne(key)
		s.mu.Unlock()
		if p != nil {
			s.end(s.life, []*partition{p}, 0)
		}
	}
}

// taking is what became of a takeover.
type taking struct {
	held
	log    *topicLog
	paused bool // by an operator: it waits
}

// takeOver decides where partitions begin. It fails as a whole only if the database does, or the brokers as a
// whole; what cannot be answered about one partition is its taking's waits.
func (s *session) takeOver(ctx context.Context, keys []topicPartition) (map[topicPartition]taking, error) {
	paused, err := s.consumer.paused(ctx)
	if err != nil {
		return nil, err
	}
	takings := map[topicPartition]taking{}
	seen := map[topicPartition]int64{}
	for round := 1; len(keys) > 0; round++ {
		if keys, err = s.takeOverOnce(ctx, keys, seen, takings, round == roundsMax); err != nil {
			return nil, err
		}
	}
	for key, t := range takings {
		t.paused = paused[key.topic]
		takings[key] = t
	}
	return takings, nil
}

// roundsMax bounds how often a takeover asks again because a position is ahead of the end of its topic.
const roundsMax = 4

// takeOverOnce returns the partitions whose positions were ahead of the end that Kafka named, and notes how far:
// their holders may have moved on after the question.
func (s *session) takeOverOnce(ctx context.Context, keys []topicPartition, seen map[topicPartition]int64, takings map[topicPartition]taking, last bool) ([]topicPartition, error) {
	answer, err := s.ask(ctx, keys)
	if err != nil {
		return nil, err
	}
	var holds []hold
	for _, key := range keys {
		log := answer.logs[key]
		if log == nil {
			takings[key] = taking{held: held{waits: answer.silent[key]}}
			continue
		}
		h := hold{topicPartition: key, log: log}
		if position, ok := seen[key]; ok {
			h.seen = &position
		}
		holds = append(holds, h)
	}
	if len(holds) == 0 {
		return nil, nil
	}
	taken, err := s.consumer.hold(ctx, holds, answer.contacts(s.engine.cfg.Start))
	if err != nil {
		return nil, err
	}
	var again []topicPartition
	for i, h := range holds {
		takings[h.topicPartition] = taking{held: taken[i], log: h.log}
		if ahead := taken[i].ahead; ahead != nil && !last {
			seen[h.topicPartition] = *ahead
			again = append(again, h.topicPartition)
		}
	}
	return again, nil
}

// start does what was decided for a partition: its worker begins, or its fetching pauses. It returns the offset
// at which the client is to fetch.
func (s *session) start(ctx context.Context, key topicPartition, t taking, during uint64) int64 {
	logger, group := s.engine.cfg.Logger, s.engine.cfg.Group
	where := []any{"group", group, "topic", key.topic, "partition", key.partition}
	switch {
	case t.waits != nil:
		wait := s.wait(key, StateWaiting, t.waits)
		if attempt, ok := s.sayWaiting(key); ok {
			logger.WarnContext(ctx, "partition cannot be taken over yet; the others begin", append(where, "error", t.waits, "attempt", attempt, "retry_in", readable(wait))...)
		}
		return 0
	case t.decision.halt != nil:
		problem := halted(t.decision.halt)
		s.wait(key, StateHalted, problem)
		s.saw(key, t)
		logger.ErrorContext(ctx, "partition halts", append(where, "error", problem)...)
		return t.decision.at
	}
	if t.decision.reset != nil {
		logger.ErrorContext(ctx, "going on at the earliest record that is left", append(where, "error", t.decision.reset, "resume", t.decision.at)...)
	}
	logger.InfoContext(ctx, "partition assigned", append(where, "epoch", t.pos.epoch, "resume", t.decision.at, "why", t.decision.why,
		"position", orNone(t.pos.stored), "committed", t.log.committed.String(), "first", t.log.first, "end", t.log.end)...)
	s.work(t, during) //nolint:contextcheck // the worker outlives the assignment
	return t.decision.at
}

// orNone is an offset for people.
func orNone(offset *int64) any {
	if offset == nil {
		return "none"
	}
	return *offset
}

var errPaused = errors.New("an operator paused the topic")

// wait pauses a partition that does not begin. It returns when the next attempt comes, if that is by itself.
func (s *session) wait(key topicPartition, state PartitionState, why error) (retryIn time.Duration) {
	s.client.PauseFetchPartitions(map[string][]int32{key.topic: {key.partition}})
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.assignments[key]
	if a == nil {
		return 0
	}
	a.become(state, why)
	a.retryAt = time.Time{}
	if state == StateWaiting {
		a.attempt++
		retryIn = s.engine.backoff(a.attempt)
		a.retryAt = time.Now().Add(retryIn)
	}
	select {
	case s.late <- struct{}{}:
	default:
	}
	return retryIn
}

// work starts the worker of a partition. during is the poll that may still bring what was fetched before.
func (s *session) work(t taking, during uint64) {
	key := topicPartition{t.pos.topic, t.pos.partition}
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.assignments[key]
	if s.closing || a == nil {
		return
	}
	p := newPartition(s, t.pos, t.log.topicID)
	p.during = during
	p.queue.start(t.decision.at)
	p.queue.halt(t.paused)
	s.partitions[key] = p
	p.paused = t.paused
	s.noteWork(p)
	a.attempt, a.retryAt, a.saidAt = 0, time.Time{}, time.Time{}
	a.saw(t)
	a.topicID, a.widen, a.begins, a.handledFrom = t.log.topicID, false, t.decision.rewoundTo, t.pos.handledFrom
	if t.decision.moved {
		// Kafka's offset may be of another program and behind, which would undo it.
		s.marks[key] = done{t.log.topicID, t.decision.at, -1}
	}
	s.client.ResumeFetchPartitions(map[string][]int32{key.topic: {key.partition}})
	go p.run()
}

// saw keeps what a takeover found, for people.
func (a *assignment) saw(t taking) {
	a.position, a.epoch, a.reached, a.end = -1, t.pos.epoch, t.decision.at, t.log.end
	if t.pos.stored != nil {
		a.position = *t.pos.stored
	}
}

func (s *session) saw(key topicPartition, t taking) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a := s.assignments[key]; a != nil {
		a.saw(t)
	}
}

// noteWaiting notes why none of the partitions of an assignment could be taken over.
func (s *session) noteWaiting(offsets map[string]map[int32]kgo.Offset, err error) {
	for topic, numbers := range offsets {
		for number := range numbers {
			s.note(topicPartition{topic, number}, StateWaiting, err)
		}
	}
}

// retake ends the worker of an assigned partition, if it has one, and decides again where it begins: an operator
// ordered that, or paused or resumed its topic; its leader is back; the database went back. It does nothing for
// a partition that was taken away meanwhile.
func (s *session) retake(ctx context.Context, key topicPartition, why string) {
	s.ends.Lock()
	defer s.ends.Unlock()
	s.mu.Lock()
	p, a, closing := s.partitions[key], s.assignments[key], s.closing
	delete(s.partitions, key)
	s.mu.Unlock()
	if a == nil || closing {
		return
	}
	one := map[string][]int32{key.topic: {key.partition}}
	s.client.PauseFetchPartitions(one)
	if p != nil {
		s.engine.cfg.Logger.InfoContext(ctx, "partition is taken over anew", "group", s.engine.cfg.Group, "topic", key.topic, "partition", key.partition, "why", why)
		s.note(key, StateDraining, errors.New(why))
		s.stop(ctx, []*partition{p}, min(s.engine.cfg.DrainMax, retakeDrainMax))
		s.commitMarks(ctx)
	}
	limited, cancel := context.WithTimeout(ctx, takeOverMax)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)() //nolint:contextcheck // either may end first
	takings, err := s.takeOver(limited, []topicPartition{key})
	if err != nil {
		takings = map[topicPartition]taking{key: {held: held{waits: err}}}
	}
	t := takings[key]
	if t.pos != nil && t.decision.halt == nil {
		// Everything that the client fetched is dropped by this, except for what a poll holds in its hands.
		s.client.SetOffsets(map[string]map[int32]kgo.EpochOffset{key.topic: {key.partition: {Epoch: -1, Offset: t.decision.at}}})
	}
	s.start(ctx, key, t, s.polls.Load())
	if t.decision.moved {
		s.commitMarks(ctx) // at once: an offset of another program that lies behind would pass for a rewind
	}
}

// sayEvery keeps a partition that waits from flooding the log.
const sayEvery = 30 * time.Second

// sayWaiting reports whether the log is to say again that a partition waits, and at which attempt it is.
func (s *session) sayWaiting(key topicPartition) (attempt int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.assignments[key]
	if a == nil || time.Since(a.saidAt) < sayEvery {
		return 0, false
	}
	a.saidAt = time.Now()
	return a.attempt, true
}

// retakeDrainMax bounds how long a rebalance may have to wait for a retake.
const retakeDrainMax = 5 * time.Second

// revoked waits, bounded, until the partitions have finished or rolled back their batch, and commits
// the offsets, before another member gets them.
func (s *session) revoked(ctx context.Context, _ *kgo.Client, keys map[string][]int32) {
	if len(keys) == 0 {
		return
	}
	e, began := s.engine, time.Now()
	s.giveBack(ctx, keys)
	if s.isClosing() {
		return // drain says it
	}
	e.cfg.Logger.InfoContext(ctx, "partitions were revoked and are given back", "group", e.cfg.Group, "partitions", keys, "lasted", readable(time.Since(began)))
}

// lost stops at once: another member holds the partitions already. What is committed late anyway is
// found by their claims, and the epoch of the position refuses the rest.
func (s *session) lost(ctx context.Context, _ *kgo.Client, keys map[string][]int32) {
	if len(keys) == 0 {
		return
	}
	s.engine.cfg.Logger.WarnContext(ctx, "partitions were lost: this consumer was away for longer than its session", "group", s.engine.cfg.Group, "partitions", keys)
	s.ends.Lock()
	defer s.ends.Unlock()
	s.stop(ctx, s.take(keys), 0)
	s.forget(keys)
}

// rehold takes one partition over again after its position was fenced. It fails with errWentBack if the
// database is behind what this consumer committed.
func (s *session) rehold(ctx context.Context, p *partition) error {
	key := topicPartition{p.pos.topic, p.pos.partition}
	ctx, cancel := context.WithTimeout(ctx, takeOverMax)
	defer cancel()
	answer, err := s.ask(ctx, []topicPartition{key})
	if err != nil {
		return err
	}
	log := answer.logs[key]
	if log == nil {
		return answer.silent[key]
	}
	taken, err := s.consumer.hold(ctx, []hold{{topicPartition: key, log: log, running: true}}, nil)
	if err != nil {
		return err
	}
	before := p.pos.stored
	p.pos.renew(taken[0].pos)
	p.publish()
	s.mu.Lock()
	if a := s.assignments[key]; a != nil {
		a.epoch = p.pos.epoch
	}
	s.mu.Unlock()
	if before != nil && (p.pos.stored == nil || *p.pos.stored < *before) {
		return errWentBack
	}
	return nil
}

var errWentBack = errors.New("the database went back behind what was committed (a failover?): resuming at its position")

// contacts lists the topics that the group may meet now: those of which everything is known that this takes.
func (a topicLogs) contacts(start Start) []contact {
	byTopic := map[string]map[int32]*topicLog{}
	for key, log := range a.logs {
		if byTopic[key.topic] == nil {
			byTopic[key.topic] = map[int32]*topicLog{}
		}
		byTopic[key.topic][key.partition] = log
	}
	var contacts []contact
	for _, topic := range slices.Sorted(maps.Keys(byTopic)) {
		logs, count := byTopic[topic], a.counts[topic]
		if start == StartLatest && len(logs) < int(count) {
			continue
		}
		for _, log := range logs {
			contacts = append(contacts, contact{topic: topic, topicID: log.topicID, partitions: count, rows: firstPositions(start, logs)})
			break
		}
	}
	return contacts
}

// String says what is committed, for people.
func (c *committedOffset) String() string {
	if c == nil {
		return "none"
	}
	return fmt.Sprint(c.offset)
}
