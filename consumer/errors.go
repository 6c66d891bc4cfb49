package consumer

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/effectonce/effectonce/internal/pgerr"
)

// Permanent marks an error that a retry cannot fix: the message itself is at fault. It is parked at
// once, or treated according to Config.OnFailure.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

// IsPermanent reports whether err, or one that it wraps, was marked by Permanent.
func IsPermanent(err error) bool {
	var permanent *permanentError
	return errors.As(err, &permanent)
}

// RetryAfter marks a temporary error, and delays the next attempt by at least d, which is limited
// to one hour. The partition waits for that long. The attempt counts.
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

// batchError is the failure of a batch that cannot be attributed to one message.
type batchError struct{ err error }

func (e *batchError) Error() string { return e.err.Error() }
func (e *batchError) Unwrap() error { return e.err }

// messageError is the failure of one message of a batch.
type messageError struct {
	index int // in the batch
	err   error
}

func (e *messageError) Error() string { return e.err.Error() }
func (e *messageError) Unwrap() error { return e.err }

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

// endedByHandler recognises the server's errors after a handler ended the transaction itself:
// refuse_commit rejects the handler's COMMIT, and after its ROLLBACK the engine's cursor does not
// exist.
func endedByHandler(err error) bool {
	return pgerr.Is(err, pgerr.TransactionEndedByOther) || pgerr.Is(err, pgerr.UnknownCursor) && strings.Contains(err.Error(), guardCursor)
}
