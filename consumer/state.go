package consumer

import (
	"time"

	"github.com/google/uuid"
)

// partitionState is what an assigned partition does. docs/design.md has the table of states and events.
type partitionState uint8

const (
	// stateWaiting: assigned, and not taken over: the database or the partition's leader does not answer.
	stateWaiting partitionState = iota
	// stateRunning: its messages are handled.
	stateRunning
	// stateWaitingForDatabase: its worker waits until the database answers.
	stateWaitingForDatabase
	// stateBroken: too many of its messages failed; it pauses instead of parking.
	stateBroken
	// stateBlocked: a message fails, and Config.OnFailure is OnFailureBlock.
	stateBlocked
	// statePaused: an operator paused its topic.
	statePaused
	// stateHalted: it waits for an operator's decision.
	stateHalted
	// stateDraining: it was taken away, or Run ends; the batch in progress may finish.
	stateDraining
	// stateFenced: another consumer took it over while this one held it.
	stateFenced
)

func (s partitionState) String() string {
	switch s {
	case stateWaiting:
		return "waiting"
	case stateRunning:
		return "running"
	case stateWaitingForDatabase:
		return "waiting for the database"
	case stateBroken:
		return "paused by the breaker"
	case stateBlocked:
		return "blocked by a message"
	case statePaused:
		return "paused by an operator"
	case stateHalted:
		return "halted"
	case stateDraining:
		return "draining"
	case stateFenced:
		return "fenced"
	default:
		return "unknown"
	}
}

// assignment is a partition that Kafka assigned to this session, in work or not.
type assignment struct {
	state    partitionState
	since    time.Time // of the state
	err      error     // why it does not run; nil: it does
	position int64     // the next offset that is stored; -1: none
	end      int64     // of the topic when it was asked for last; -1: not known

	// Of the takeover: where it began, or the rewind that it goes on with, and from where on its name had worked through what lies behind the position.
	topicID                    uuid.UUID
	epoch, begins, handledFrom int64
	widen                      bool // that range begins earlier now, which is to be stored

	attempt int       // at taking it over
	retryAt time.Time // zero: nothing is due
	saidAt  time.Time // when the log said last that it waits
}

// note sets the state of an assigned partition. It changes nothing for one that is not assigned.
func (s *session) note(key topicPartition, state partitionState, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a := s.assignments[key]; a != nil {
		a.become(state, err)
	}
}

func (a *assignment) become(state partitionState, err error) {
	if a.state != state || a.since.IsZero() {
		a.since = time.Now()
	}
	a.state, a.err = state, err
}

// notePause notes that an operator paused a partition's topic, or resumed it.
func (s *session) notePause(key topicPartition, paused bool) {
	if paused {
		s.note(key, statePaused, errPaused)
	} else {
		s.note(key, stateRunning, nil)
	}
}
