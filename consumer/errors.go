package consumer

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// Permanent marks an error that no further attempt can cure: the message itself is at fault. It is parked at
// once (or what Config.OnFailure says).
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

// RetryAfter marks an error that may pass, and says when the next attempt makes sense: not before d, which is
// cut to an hour. The partition waits for that long; the attempt counts.
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

// batchError is the failure of a handler of whole batches that does not say whose it is.
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

// PanicError is what a panic of a handler becomes.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string { return fmt.Sprintf("handler panicked: %v\n%s", e.Value, e.Stack) }

// errFenced: the position belongs to a later holder, or the database went back behind it.
var errFenced = errors.New("position is held by another consumer, or the database went back")

// errConnectionLost is added to the error of a handler whose connection broke under it.
var errConnectionLost = errors.New("database connection lost")

// endedByHandler recognises what the server says when a handler ends the transaction behind the engine's
// back: its own COMMIT is refused by refuse_commit, and after its ROLLBACK the engine's cursor is not there.
func endedByHandler(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && (pgErr.Code == "EO002" || pgErr.Code == "34000" && strings.Contains(pgErr.Message, guardCursor))
}
