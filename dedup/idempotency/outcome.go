package idempotency

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// Response is the outcome of a request: what the client gets, now and at each later try. It need not be HTTP's.
type Response struct {
	// Status 0, or 200 to 999: what HTTP has below is no answer, and net/http panics at it.
	Status int
	// Header to replay, byte for byte. Only what may be shown again; what NeverStored tells, and what a header Connection
	// names, is left out of what is stored.
	Header map[string][]string
	// Body, at most Config.ResponseBytesMax; of a larger one only the fact is stored.
	Body []byte

	// Replayed: it was stored by an earlier execution.
	Replayed bool
	// BodyDropped: there was a body, and it was too large to be stored.
	BodyDropped bool
}

// What is found under a key, instead of work to do.
var (
	// ErrMismatch: the key was used for another request. Nothing was done; the remedy is another key.
	ErrMismatch = errors.New("the idempotency key was used for another request")
	// ErrInProgress: somebody else works on the key. Nothing was done; try again later. See InProgressError.
	ErrInProgress = errors.New("a request with this idempotency key is in progress")
	// ErrIndeterminate: whether a foreign system acted is unknown, and it must not be asked again: a person or the
	// reconciler decides. Trying again gives the same error until then.
	ErrIndeterminate = errors.New("the outcome of the request with this idempotency key is unknown: it has to be looked into")
	// ErrAbandoned: the attempts of the key are used up: a person decides.
	ErrAbandoned = errors.New("the request with this idempotency key was given up: it has to be looked into")
	// ErrLockLost: another worker took the key over, because this one did not renew its lock in time. What it had
	// not committed is rolled back.
	ErrLockLost = errors.New("another worker has taken over the idempotency key")
	// ErrUnknownRecoveryPoint: the phases that are done are not the first ones of this program's list: it was deployed
	// with other phases. Nothing was run again, and the key goes on with a program that knows them, or when a person finishes
	// it.
	ErrUnknownRecoveryPoint = errors.New("the phases that are done do not begin this flow's list")
	// ErrUnanswered: the connection was lost during COMMIT, so nobody knows yet. Asking again under the same key finds
	// out.
	ErrUnanswered = errors.New("the database did not answer COMMIT: ask again with the same key")
)

// InProgressError is an ErrInProgress that says when it is worth trying again.
type InProgressError struct{ RetryAfter time.Duration }

func (e *InProgressError) Error() string {
	return fmt.Sprintf("%v: try again in %v", ErrInProgress, e.RetryAfter)
}
func (e *InProgressError) Unwrap() error { return ErrInProgress }

// FinalError is what Final makes.
type FinalError struct {
	Response Response
	Err      error
}

func (e *FinalError) Error() string { return e.Err.Error() }
func (e *FinalError) Unwrap() error { return e.Err }

// Final says that the work failed for good (declined, invalid, not found): what it wrote is rolled back, and the
// response is stored as its outcome, and replayed. Once and Flow.Do return the response and no error.
func Final(response Response, err error) error { return &FinalError{response, err} }

type indeterminateError struct{ err error }

func (e *indeterminateError) Error() string   { return e.err.Error() }
func (e *indeterminateError) Unwrap() []error { return []error{ErrIndeterminate, e.err} }

// Indeterminate says that a foreign system may have acted or not, and cannot be asked again under the same key: what the
// work or the phase wrote is rolled back, and the key stops until a person or the reconciler decides. The mark is written after
// the fact: where the database or the process is gone in that moment, only a phase that is AtMostOnce is not run again.
func Indeterminate(err error) error { return &indeterminateError{err} }

type notDoneError struct{ err error }

func (e *notDoneError) Error() string { return e.err.Error() }
func (e *notDoneError) Unwrap() error { return e.err }

// NotDone says that a foreign system certainly did nothing (refused, connection not made): a call of a phase that is
// AtMostOnce may be made again.
func NotDone(err error) error { return &notDoneError{err} }

// conflict tells errors that end a transaction and are gone with the next: serialization failure and deadlock.
func conflict(err error) bool {
	var refusal *pgconn.PgError
	return errors.As(err, &refusal) && (refusal.Code == "40001" || refusal.Code == "40P01")
}

// waited tells a lock that was not to be had in time.
func waited(err error) bool {
	var refusal *pgconn.PgError
	return errors.As(err, &refusal) && refusal.Code == "55P03"
}

// lost tells that advance_key or finish_key found another token.
func lost(err error) bool {
	var refusal *pgconn.PgError
	return errors.As(err, &refusal) && refusal.Code == "EO003"
}

// text is what is stored of an error.
func text(err error) string {
	return fmt.Sprintf("%.2000s", strings.ReplaceAll(strings.ToValidUTF8(err.Error(), "\uFFFD"), "\x00", ""))
}

// pause waits or returns false when ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
