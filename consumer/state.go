package consumer

import (
	"time"

	"github.com/google/uuid"
)

// PartitionState is what an assigned partition does. docs/operations.md says what to do about each.
type PartitionState uint8

// The states. Of the states that the workers of a partition are in, the last in this list counts.
const (
	// StateUnassigned: the partition is not assigned to this consumer.
	StateUnassigned PartitionState = iota
	// StateWaiting: it is not taken over yet: the database or the partition's leader does not answer.
	StateWaiting
	// StateRunning: its messages are handled.
	StateRunning
	// StatePausedByOperator: an operator paused its topic.
	StatePausedByOperator
	// StateWaitingForDatabase: it waits until the database answers.
	StateWaitingForDatabase
	// StatePausedByBreaker: too many of its messages fail; it pauses instead of parking them. See Config.ParkShareMax.
	StatePausedByBreaker
	// StateBlocked: it tries one message again and again, because OnFailure is OnFailureBlock or because the message
	// cannot be parked; or too many handlers do not return. See Config.AbandonedMax.
	StateBlocked
	// StateFenced: another consumer took the partition over while this one held it. The group's assignment decides.
	StateFenced
	// StateHalted: it waits for an operator's decision.
	StateHalted
	// StateDraining: it was taken away, or Run ends. The batch in progress may finish.
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

// assignment is a partition that Kafka assigned to this session, in work or not. The session's mutex guards it.
type assignment struct {
	key      topicPartition
	changed  func(StateChange)
	state    PartitionState
	since    time.Time // of the state
	err      error     // why it does not run, or why it tries a message again; nil: neither
	position int64     // the next offset that is stored; -1: none
	reached  int64     // what comes before is handled, from where this assignment began; -1: not known
	end      int64     // of the topic when it was asked for last; -1: not known
	parked   int64     // messages when they were counted last; -1: not known

	// Of the takeover: where it began, or the rewind that it continues, and from where on its name had worked through what lies behind the position.
	topicID                    uuid.UUID
	epoch, begins, handledFrom int64
	widen                      bool // that range begins earlier now, which is to be stored

	attempt int       // at taking it over
	retryAt time.Time // zero: nothing is due
	saidAt  time.Time // when the log said last that it waits
}

// assignOne notes that a partition is assigned. One that is assigned again without having run has waited since the
// first time. The caller holds the mutex.
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

// laneState is what a lane does, and why it does not run or tries a message again.
type laneState struct {
	state PartitionState
	err   error
}

// become notes what the lane does. It is called after each commit: where the lane ran before, too, it takes no lock.
func (l *lane) become(state PartitionState, err error) {
	now := laneState{state, err}
	if now == (laneState{state: StateRunning}) && l.does == now {
		return
	}
	l.does = now
	if l.noted != nil {
		l.noted(l)
	}
}

// noteLane notes what a lane of a partition does. It changes nothing where the partition was taken out of work: then it
// drains, whatever its lanes do.
func (s *session) noteLane(p *partition, l *lane) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.does == (laneState{state: StateRunning}) {
		delete(p.lanes, l)
	} else {
		p.lanes[l] = l.does
	}
	s.noteWork(p)
}

// notePause notes whether an operator paused a partition's topic.
func (s *session) notePause(p *partition, paused bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p.paused = paused
	s.noteWork(p)
}

// noteWork sets the state of a partition in work: the worst of its lanes', or that its topic is paused. The caller holds
// the mutex.
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
