package consumer

import (
	"time"

	"github.com/google/uuid"
)

// PartitionState is the state of an assigned partition. docs/how-to/consume.md describes what to do
// about each.
type PartitionState uint8

// The states. If the workers of a partition are in different states, the last one in this list
// counts.
const (
	// StateUnassigned: the partition is not assigned to this consumer.
	StateUnassigned PartitionState = iota
	// StateWaiting: it is not taken over yet, because the database or the partition's leader does
	// not answer.
	StateWaiting
	// StateRunning: its messages are handled.
	StateRunning
	// StatePausedByOperator: an operator paused its topic.
	StatePausedByOperator
	// StateWaitingForDatabase: it waits until the database answers.
	StateWaitingForDatabase
	// StatePausedByBreaker: too many of its messages fail; it pauses instead of parking them. See
	// Config.ParkShareMax.
	StatePausedByBreaker
	// StateBlocked: it retries one message repeatedly, because OnFailure is OnFailureBlock or
	// because the message cannot be parked; or too many handlers do not return. See
	// Config.AbandonedMax.
	StateBlocked
	// StateFenced: another consumer took the partition over while this one held it. The group's
	// assignment decides.
	StateFenced
	// StateHalted: it waits for an operator's decision.
	StateHalted
	// StateDraining: it was revoked, or Run ends. The batch in progress may finish.
	StateDraining
)

// String describes the state in a few words.
func (s PartitionState) String() string {
	switch s {
	case StateUnassigned:
		return "unassigned"
	case StateWaiting:
		return "waiting"
	case StateRunning:
		return "running"
	case StatePausedByOperator:
		return "paused by an operator"
	case StateWaitingForDatabase:
		return "waiting for the database"
	case StatePausedByBreaker:
		return "paused by the breaker"
	case StateBlocked:
		return "blocked"
	case StateFenced:
		return "fenced"
	case StateHalted:
		return "halted"
	case StateDraining:
		return "draining"
	default:
		return "unknown"
	}
}

// MarshalText is String, for JSON.
func (s PartitionState) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// assignment is a partition that Kafka assigned to this session, running or not. The session's
// mutex guards it.
type assignment struct {
	key      topicPartition
	changed  func(StateChange)
	state    PartitionState
	since    time.Time // when the state began
	err      error     // why it does not run, or why it retries a message; nil: neither
	position int64     // the stored next offset; -1: none
	reached  int64     // this assignment handled everything before this offset; -1: unknown
	end      int64     // of the topic, as last read; -1: unknown
	parked   int64     // messages, as last counted; -1: unknown

	// Of the takeover: begins is where it began, or where the rewind began that it continues. From
	// handledFrom on, the consumer's name had handled everything up to the position.
	topicID                    uuid.UUID
	epoch, begins, handledFrom int64
	widen                      bool // the range now begins earlier, which must be stored

	attempt int       // to take it over
	retryAt time.Time // zero: nothing is due
	saidAt  time.Time // when the log last reported that it waits
}

// assignOne records that a partition is assigned. A partition that is assigned again without having
// run keeps the time since which it waits. The caller holds the mutex.
func (s *session) assignOne(key topicPartition) {
	a := &assignment{key: key, changed: s.consumer.changes.add, position: -1, reached: -1, end: -1, parked: -1}
	var why error
	if before := s.assignments[key]; before != nil {
		a.state, a.since, a.parked = before.state, before.since, before.parked
		if before.state == StateWaiting {
			why = before.err
		}
	}
	s.assignments[key] = a
	a.become(StateWaiting, why)
}

// note sets the state of an assigned partition. It changes nothing for one that is not assigned.
func (s *session) note(key topicPartition, state PartitionState, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a := s.assignments[key]; a != nil {
		a.become(state, err)
	}
}

func (a *assignment) become(state PartitionState, err error) {
	from := a.state
	a.state, a.err = state, err
	if from != state {
		a.since = time.Now()
		a.changed(StateChange{Topic: a.key.topic, Partition: a.key.partition, From: from, To: state, Err: err})
	}
}

// laneState is the state of a lane, and why it does not run or retries a message.
type laneState struct {
	state PartitionState
	err   error
}

// become sets the state of the lane. It is called after each commit: a lane that was already
// running takes no lock.
func (l *lane) become(state PartitionState, err error) {
	now := laneState{state, err}
	if now == (laneState{state: StateRunning}) && l.does == now {
		return
	}
	l.does = now
	if l.noted != nil {
		l.noted(l, now)
	}
}

// noteLane records the state of a lane of a partition, or of a message that blocks. It changes nothing
// if the partition was taken from the session: then it drains, whatever its lanes do.
func (s *session) noteLane(p *partition, who any, does laneState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if does == (laneState{state: StateRunning}) {
		delete(p.lanes, who)
	} else {
		p.lanes[who] = does
	}
	s.noteWork(p)
}

// notePause records whether an operator paused a partition's topic.
func (s *session) notePause(p *partition, paused bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p.paused = paused
	s.noteWork(p)
}

// noteWork sets the state of a running partition: the worst state of its lanes, or that its topic
// is paused. The caller holds the mutex.
func (s *session) noteWork(p *partition) {
	a := s.assignments[p.key()]
	if s.partitions[p.key()] != p || a == nil {
		return
	}
	worst := laneState{state: StateRunning}
	if p.paused {
		worst = laneState{StatePausedByOperator, errPaused}
	}
	for _, does := range p.lanes {
		if does.state > worst.state || does.state == worst.state && worst.err == nil {
			worst = does
		}
	}
	a.become(worst.state, worst.err)
}
