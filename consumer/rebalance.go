package consumer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/pause"
)

// assigned is called by the client between the assignment of partitions and their first fetch. It
// takes them over and returns where they resume: see decideStart.
//
// ctx ends with the assignment. The assignment waits while the database or the brokers are
// unavailable. A single partition without an answer waits alone.
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
			return offsets, nil // begin nothing: the next holder would treat it as a crash
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
		pause.For(ctx, wait)
	}
}

// takeOverMax bounds one attempt, so that a request that hangs is abandoned and logged.
const takeOverMax = 15 * time.Second

func (s *session) isClosing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closing
}

// begin takes over the assigned partitions and starts their workers.
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
		// Set no leader epoch: the client would check for truncation against an epoch that belongs
		// to another offset. Set an offset and not "the start" even if the partition is paused and
		// must wait: the client tracks a partition only once it has an offset, and retake moves it.
		resumed[key.topic][key.partition] = kgo.NewOffset().At(s.start(ctx, key, taken[key], 0))
	}
	return resumed, nil
}

// assign records that partitions are assigned, and ends workers that may remain from an earlier
// assignment.
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

// taking is the result of a takeover.
type taking struct {
	held
	log    *topicLog
	paused bool // by an operator: it waits
}

// takeOver decides where partitions begin. It returns an error only if the database or all brokers
// fail. If one partition gets no answer, its taking's waits is the reason.
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

// roundsMax bounds how often a takeover asks Kafka again because a position is ahead of the end of
// its topic.
const roundsMax = 4

// takeOverOnce returns the partitions whose positions were ahead of the end that Kafka reported,
// and stores those positions in seen: their holders may have advanced after Kafka's answer.
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

// start carries out the decision for a partition: its worker begins, or its fetching pauses. It
// returns the offset at which the client must fetch.
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
		logger.ErrorContext(ctx, "continuing at the earliest remaining record", append(where, "error", t.decision.reset, "resume", t.decision.at)...)
	}
	logger.InfoContext(ctx, "partition assigned", append(where, "epoch", t.pos.epoch, "resume", t.decision.at, "why", t.decision.why,
		"position", orNone(t.pos.stored), "committed", t.log.committed.String(), "first", t.log.first, "end", t.log.end)...)
	s.startWorker(t, during) //nolint:contextcheck // the worker outlives the assignment
	return t.decision.at
}

// orNone is an offset for a log line.
func orNone(offset *int64) any {
	if offset == nil {
		return "none"
	}
	return *offset
}

var errPaused = errors.New("an operator paused the topic")

// wait pauses a partition that does not begin. It returns the time until the next attempt, or 0 if
// none follows automatically.
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

// startWorker starts the worker of a partition. during is the poll that may still return records that were
// fetched before.
func (s *session) startWorker(t taking, during uint64) {
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
		// Kafka's offset may be behind and committed by another program, which would undo the move.
		s.marks[key] = done{t.log.topicID, t.decision.at, -1}
	}
	s.client.ResumeFetchPartitions(map[string][]int32{key.topic: {key.partition}})
	go p.handleUntilStopped()
}

// saw stores what a takeover found, for the Status.
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

// noteWaiting stores why none of the partitions of an assignment could be taken over.
func (s *session) noteWaiting(offsets map[string]map[int32]kgo.Offset, err error) {
	for topic, numbers := range offsets {
		for number := range numbers {
			s.note(topicPartition{topic, number}, StateWaiting, err)
		}
	}
}

// retake ends the worker of an assigned partition, if it has one, and decides again where it
// begins. The reason is an operator's order, a topic that an operator paused or resumed, a leader
// that is available again, or a database that lost commits. It does nothing for a partition that
// was revoked.
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
		s.engine.cfg.Logger.InfoContext(ctx, "partition is taken over again", "group", s.engine.cfg.Group, "topic", key.topic, "partition", key.partition, "why", why)
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
		// This drops everything that the client fetched, except what a running poll has already
		// taken.
		s.client.SetOffsets(map[string]map[int32]kgo.EpochOffset{key.topic: {key.partition: {Epoch: -1, Offset: t.decision.at}}})
	}
	s.start(ctx, key, t, s.polls.Load())
	if t.decision.moved {
		s.commitMarks(ctx) // at once: another program's offset behind it would look like a rewind
	}
}

// sayEvery limits how often a waiting partition is logged.
const sayEvery = 30 * time.Second

// sayWaiting reports whether to log again that a partition waits, and which attempt it is at.
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

// retakeDrainMax bounds how long a rebalance may wait for a retake.
const retakeDrainMax = 5 * time.Second

// revoked waits, for a bounded time, until the partitions have finished or rolled back their batch.
// It commits the offsets before another member gets the partitions.
func (s *session) revoked(ctx context.Context, _ *kgo.Client, keys map[string][]int32) {
	if len(keys) == 0 {
		return
	}
	e, began := s.engine, time.Now()
	s.giveBack(ctx, keys)
	if s.isClosing() {
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
	s.engine.cfg.Logger.WarnContext(ctx, "partitions were lost: this consumer was away for longer than its session", "group", s.engine.cfg.Group, "partitions", keys)
	s.ends.Lock()
	defer s.ends.Unlock()
	s.stop(ctx, s.removePartitions(keys), 0)
	s.forget(keys)
}

// rehold takes one partition over again after its position was fenced. It returns errWentBack if
// the database is behind what this consumer committed.
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

var errWentBack = errors.New("the database lost commits of this consumer (a failover?): resuming at its position")

// contacts lists the topics whose first contact can be stored now. With StartLatest that needs an
// answer about every partition.
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

// String returns the committed offset for a log line.
func (c *committedOffset) String() string {
	if c == nil {
		return "none"
	}
	return fmt.Sprint(c.offset)
}
