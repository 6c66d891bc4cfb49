package consumer

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// Permanent marks an error that a retry cannot fix: the message itself is at fault. It is parked at
// once, or treated according to Config.OnFailure.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{reasonPermanent, err}
}

type permanentError struct {
	reason string // in parked_messages
	err    error
}

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

// IsPermanent reports whether err, or one that it wraps, was marked by Permanent.
func IsPermanent(err error) bool {
	var permanent *permanentError
	return errors.As(err, &permanent)
}

// RetryAfter marks a temporary error, and delays the next attempt by at least d, which is limited
// to one hour. The message is parked until then; only messages of its key wait for it. The attempt
// counts.
func RetryAfter(d time.Duration, err error) error {
	if err == nil {
		return nil
	}
	return &retryAfterError{min(max(d, 0), time.Hour), err}
}

type retryAfterError struct {
	after time.Duration
	err   error
}

func (e *retryAfterError) Error() string { return e.err.Error() }
func (e *retryAfterError) Unwrap() error { return e.err }

// messageError is the failure of a message, or of a batch if msg is nil: then any of its messages may
// be at fault.
type messageError struct {
	msg *Message
	err error
}

func (e *messageError) Error() string { return e.err.Error() }
func (e *messageError) Unwrap() error { return e.err }

// Blame reports which message of a Batch failed, so that the batch need not be split to find it.
func Blame(msg *Message, err error) error {
	if err == nil {
		return nil
	}
	return &messageError{msg, err}
}

// blame attributes the error of a function that got messages: to the one of these that Blame names, or to
// the only one. Otherwise any message of the transaction may be at fault.
func blame(err error, msgs ...*Message) error {
	var known *messageError
	switch {
	case errors.As(err, &known) && (known.msg == nil || slices.Contains(msgs, known.msg)):
		return known
	case len(msgs) == 1:
		return &messageError{msgs[0], err}
	}
	return &messageError{nil, err}
}

// PanicError is a recovered panic of a handler.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string { return fmt.Sprintf("handler panicked: %v\n%s", e.Value, e.Stack) }

// errFenced: the position belongs to a later holder, or the database lost commits.
var errFenced = errors.New("position is held by another consumer, or the database lost commits")

// errConnectionLost is joined to the error of a handler whose connection broke.
var errConnectionLost = errors.New("database connection lost")
