package consumer

import (
	"cmp"
	"encoding/json"
	"net/http"
	"slices"
	"time"

	"github.com/effectonce/effectonce/internal/say"
)

// Phase is what Run is doing.
type Phase string

// The phases.
const (
	// PhaseStopped: Run was not called yet, or it returned.
	PhaseStopped Phase = "stopped"
	// PhaseStarting: Run checks the database and the topics, and waits for them if they do not
	// answer.
	PhaseStarting Phase = "starting"
	// PhaseJoining: the consumer is not yet, or no longer, in the group.
	PhaseJoining Phase = "joining"
	// PhaseConsuming: the consumer is in the group. It may have no partitions.
	PhaseConsuming Phase = "consuming"
	// PhaseDraining: Run's context ended; batches in progress may finish.
	PhaseDraining Phase = "draining"
)

// Status is the state of a consumer.
type Status struct {
	Group string `json:"group"`
	Phase Phase  `json:"phase"`
	// Err is why the consumer does not consume: what Run waits for, why it rejoins the group, or
	// what it returned. It is empty while the consumer consumes.
	Err string `json:"-"`
	// Partitions are those that Kafka assigned to this consumer, sorted by topic and number.
	Partitions []PartitionStatus `json:"partitions"`
}

// PartitionStatus is the state of a partition.
type PartitionStatus struct {
	Topic     string         `json:"topic"`
	Partition int32          `json:"partition"`
	State     PartitionState `json:"state"`
	Since     time.Time      `json:"since"` // when the state began
	// Err is why the partition does not run, or the last failure of the message that it retries.
	// Otherwise it is empty. It may contain the text of a handler's error, such as parts of a
	// payload.
	Err string `json:"-"`
	// Position is the stored next offset; -1: none is stored.
	Position int64 `json:"position"`
	// Lag is the number of offsets between the last handled message and the end of the partition.
	// The end is as this consumer last saw it: with the last records that arrived, or up to a
	// minute ago. A topic without new writes has lag 0. Offsets of control records count for up to
	// 10 s. -1: unknown, the partition is not acquired.
	Lag int64 `json:"lag"`
	// Epoch is the epoch under which this consumer holds the partition; 0: it is not acquired.
	Epoch int64 `json:"epoch"`
}

// PartitionState is the state of an assigned partition. docs/how-to/consume.md describes what to do
// about each.
type PartitionState string

// The states. If the workers of a partition are in different states, the last one in this list
// counts.
const (
	// StateWaiting: it is not acquired yet, because the database or the partition's leader does not
	// answer.
	StateWaiting PartitionState = "waiting"
	// StateRunning: its messages are handled.
	StateRunning PartitionState = "running"
	// StatePausedByOperator: an operator paused its topic.
	StatePausedByOperator PartitionState = "paused by an operator"
	// StateWaitingForDatabase: it waits until the database answers.
	StateWaitingForDatabase PartitionState = "waiting for the database"
	// StatePausedByBreaker: too many of its messages fail; it pauses instead of parking them. See
	// Config.ParkShareMax.
	StatePausedByBreaker PartitionState = "paused by the breaker"
	// StateBlocked: it retries one message repeatedly, because OnFailure is OnFailureBlock or
	// because the message cannot be parked; or too many handlers do not return. See
	// Config.AbandonedMax.
	StateBlocked PartitionState = "blocked"
	// StateFenced: another consumer took the partition while this one held it. The group's
	// assignment decides.
	StateFenced PartitionState = "fenced"
	// StateHalted: it waits for an operator's decision.
	StateHalted PartitionState = "halted"
	// StateDraining: it was revoked, or Run ends. The batch in progress may finish.
	StateDraining PartitionState = "draining"
)

// severity is the place of the state of a lane or a message in that list.
func (s PartitionState) severity() int {
	return slices.Index([]PartitionState{StateRunning, StatePausedByOperator, StateWaitingForDatabase, StatePausedByBreaker, StateBlocked, StateFenced}, s)
}

// assignment is a partition that Kafka assigned to this session, running or not. The session's
// mutex guards it.
type assignment struct {
	key topicPartition
	p   *partition // its worker; nil: it does not run
	pos *position  // as last acquired; nil: not acquired

	does condition // without a worker

	reached int64 // this assignment handled everything before this offset; -1: unknown
	end     int64 // of the topic, as last read; -1: unknown
	mark    int64 // offset to be committed to Kafka; -1: none

	acquiring bool      // it is being acquired again
	attempt   int       // to acquire it, since it last handled something
	retryAt   time.Time // when it is acquired again; zero: nothing is due
	said      say.Lines // that it waits

	unreadable error // why its next records cannot be read
	reads      int   // that brought damaged records in a row, at this position
	readAt     int64
}

// condition is the state of a partition, why it does not run, and since when.
type condition struct {
	state PartitionState
	err   error
	since time.Time
}

func (c *condition) become(state PartitionState, err error) {
	if c.state != state || c.since.IsZero() {
		c.since = time.Now()
	}
	c.state, c.err = state, err
}

// now is the condition of the partition.
func (a *assignment) now() condition {
	if a.p == nil {
		return a.does
	}
	a.p.noting.Lock()
	defer a.p.noting.Unlock()
	return a.p.does
}

// saw stores what an acquisition found.
func (a *assignment) saw(h *hold) {
	a.pos, a.reached, a.end = h.pos, h.decision.at, h.log.end
}

// Status returns the state of the consumer and its partitions. It reads memory only, is safe for
// concurrent use, and may be called at any time, also before and after Run. It does not cover
// Deliver.
func (c *Consumer) Status() Status {
	now := c.phase.Load()
	status := Status{Group: c.cfg.Group, Phase: now.phase, Partitions: []PartitionStatus{}}
	if now.err != nil {
		status.Err = now.err.Error()
	}
	s := c.session.Load()
	if s == nil {
		return status
	}
	if status.Phase == PhaseJoining && s.joined() {
		status.Phase, status.Err = PhaseConsuming, ""
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range s.assignments {
		status.Partitions = append(status.Partitions, a.status())
	}
	slices.SortFunc(status.Partitions, func(a, b PartitionStatus) int {
		return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
	})
	return status
}

func (a *assignment) status() PartitionStatus {
	does := a.now()
	status := PartitionStatus{Topic: a.key.topic, Partition: a.key.partition, State: does.state, Since: does.since, Position: -1, Lag: -1}
	if does.err != nil {
		status.Err = does.err.Error()
	}
	if a.pos != nil {
		status.Epoch, status.Position = a.pos.epoch, a.pos.next.Load()
	}
	if a.end >= 0 && a.reached >= 0 {
		status.Lag = max(0, a.end-a.reached)
	}
	return status
}

// joined reports whether the session is a member of the group.
func (s *session) joined() bool {
	if s.life.Err() != nil {
		return false
	}
	select {
	case <-s.ready:
		member, generation := s.client.GroupMetadata()
		return member != "" && generation > 0
	default:
		return false
	}
}

// phaseNow is the phase of Run, and why it does not consume.
type phaseNow struct {
	phase Phase
	err   error
}

func (c *Consumer) enter(phase Phase, err error) { c.phase.Store(&phaseNow{phase, err}) }

// Hooks are optional callbacks, for metrics. They are called from the goroutines of partitions and
// workers, which wait for them for at most 5 s. While one does not return, none is called.
type Hooks struct {
	// Processed is called after each commit.
	Processed func(Processed)
	// Failed is called after each failed attempt at a single message.
	Failed func(Failed)
	// Parked is called for each message that a commit parked or turned into a dead letter.
	Parked func(Parked)
}

// Processed is what a transaction committed.
type Processed struct {
	Topic     string
	Partition int32
	// Fresh messages were handled, Duplicates were dropped, Parked were parked or made dead letters.
	// Conflicts were dropped although they are no duplicates, because of OnConflictDrop.
	// WithoutID are identified by their coordinates alone.
	Fresh, Duplicates, Parked, Conflicts, WithoutID int
	// Retried: the messages were parked before, and retried.
	Retried bool
	// Next is the offset after the last message, Time that message's timestamp.
	Next int64
	Time time.Time
	// Claim, Handle and Commit are the durations of the transaction's parts: up to the answer to
	// the claim, in the handler, and from there to the answer to COMMIT.
	Claim, Handle, Commit time.Duration
}

// Failed is a failed attempt at a message.
type Failed struct {
	Message *Message
	// Attempt counts from 1.
	Attempt int
	Err     error
	// Permanent: no further attempt is made.
	Permanent bool
	// Origin is where the error arose: "statement" (the handler's, in its transaction), "handler"
	// (what it returned, its other connections, its time limit) or "commit".
	Origin string
}

// Parked is a message that was not handled, and why.
type Parked struct {
	Message *Message
	// Reason as in parked_messages: failed, permanent, undecodable, unknown_type, invalid,
	// too_large, expired, conflict, crashed, behind.
	Reason   string
	Err      error // nil with "behind"
	Attempts int
	// Retry: the message is tried again, after RetryIn; otherwise only an operator can retry it.
	Retry   bool
	RetryIn time.Duration
	// DeadLetter: the message was sent to the dead letter topic.
	DeadLetter bool
}

// ReadyHandler answers 200 while the consumer is in its group, otherwise 503, with the Status as JSON,
// "ready", and for 503 the "reason". It queries neither the database nor Kafka. The answer contains
// no error texts: they may contain parts of payloads. The log and Status have them.
//
// It is meant for a readinessProbe. Readiness of a consumer routes no traffic; it decides whether a
// rollout proceeds. So a new replica is ready when it passed the checks of Run and joined its
// group: its configuration, its rights and its schema work. A consumer that waits for the database
// or for Kafka at its start is not ready. The state of single partitions never makes it unready,
// because another release would not help: a partition that is halted, blocked or waiting for the
// database is in the answer, and needs an alert. See Status.
//
// For a livenessProbe always answer 200: a restart fixes neither a database nor a partition that
// waits for an operator.
func ReadyHandler(c *Consumer) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		answer := struct {
			Ready  bool   `json:"ready"`
			Reason string `json:"reason,omitempty"`
			Status
		}{Status: c.Status()}
		answer.Ready = answer.Phase == PhaseConsuming
		code := http.StatusOK
		if !answer.Ready {
			code, answer.Reason = http.StatusServiceUnavailable, string(answer.Phase)+": see Consumer.Status and the log"
		}
		body, err := json.Marshal(answer)
		if err != nil {
			http.Error(w, "status cannot be shown", http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		w.WriteHeader(code)
		_, _ = w.Write(append(body, '\n'))
	})
}
