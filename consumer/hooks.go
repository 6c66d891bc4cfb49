package consumer

import "time"

// Hooks are optional callbacks, for metrics. They are called from the goroutines of partitions and
// workers, which wait for them for at most HandlerTimeout. While one does not return, none is called.
type Hooks struct {
	// Processed is called after each commit.
	Processed func(Processed)
	// Failed is called after each failed attempt at a single message.
	Failed func(Failed)
	// Parked is called for each message that a commit parked or turned into a dead letter.
	Parked func(Parked)
	// WithoutID is called for each message that is identified by its coordinates alone, after the
	// commit.
	WithoutID func(msg *Message)
	// State is called for each state change of an assigned partition, from a separate goroutine, in
	// the order of the changes, until Run returns. Use it for an alert on StateHalted.
	State func(StateChange)
}

// StateChange is a change of a partition's state.
type StateChange struct {
	Topic     string
	Partition int32
	From, To  PartitionState
	// Err is why the partition does not run; nil: it runs, or no error is the reason.
	Err error
}

// Processed is what a transaction committed.
type Processed struct {
	Topic     string
	Partition int32
	// Fresh messages were handled, Duplicates were dropped, Parked were parked or made dead letters.
	// Conflicts were dropped although they are no duplicates, because of OnConflictDrop.
	Fresh, Duplicates, Parked, Conflicts int
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
