package consumer

import "time"

// Hooks are optional callbacks, for metrics. They are called from the goroutines of partitions and workers.
type Hooks struct {
	// Processed is called after each commit.
	Processed func(Processed)
	// Failed is called after each failed attempt at a single message.
	Failed func(Failed)
	// Parked is called for each message that a commit parked or made a dead letter of.
	Parked func(Parked)
	// WithoutID is called for each message that is identified by its coordinates alone. A message with which
	// it panics, or does not return within HandlerTimeout, is parked.
	WithoutID func(msg *Message)
	// State is called for each change of what an assigned partition does, from a goroutine of its own, in the order of the
	// changes, until Run returns. An alert on StateHalted belongs here.
	State func(StateChange)
}

// StateChange says that a partition does something else.
type StateChange struct {
	Topic     string
	Partition int32
	From, To  PartitionState
	// Err is why the partition does not run; nil: it does, or there is no error behind it.
	Err error
}

// Processed says what a transaction committed.
type Processed struct {
	Topic     string
	Partition int32
	// Fresh messages were handled, Duplicates were dropped, Parked were parked or made dead letters.
	Fresh, Duplicates, Parked int
	// Retried: the messages were parked before, and handed back.
	Retried bool
	// Next is the offset behind the last message, Time that message's timestamp.
	Next int64
	Time time.Time
	// Claim, Handle and Commit are what the parts of the transaction took: up to the answer to the claim, in the
	// handler, from there to the answer to COMMIT.
	Claim, Handle, Commit time.Duration
}

// Failed says what an attempt at a message ended with.
type Failed struct {
	Message *Message
	// Attempt counts from 1.
	Attempt int
	Err     error
	// Permanent: no further attempt is made.
	Permanent bool
	// Origin is where the error arose: "statement" (the handler's, in its transaction), "handler" (what it returned,
	// its other connections, its time limit) or "commit".
	Origin string
}

// Parked says why a message was not handled.
type Parked struct {
	Message *Message
	// Reason as parked_messages has it: failed, permanent, undecodable, unknown_type, invalid, too_large, expired,
	// conflict, crashed, behind.
	Reason   string
	Err      error // nil with "behind"
	Attempts int
	// DeadLetter: it was sent to the dead letter topic.
	DeadLetter bool
}
