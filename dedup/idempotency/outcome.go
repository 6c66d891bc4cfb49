package idempotency

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
	// ErrAbandoned: the attempts of the key are used up, or it was overdue (FlowConfig.GiveUp): a person decides.
	ErrAbandoned = errors.New("the request with this idempotency key was given up: it has to be looked into")
	// ErrLockLost: another worker took the key over, because this one did not renew its lock in time. What it had
	// not committed is rolled back.
	ErrLockLost = errors.New("another worker has taken over the idempotency key")
	// ErrUnknownRecoveryPoint: the phases that are done are not the first ones of this program's list: it was deployed
	// with other phases, or the key is of a flow with another name. Nothing was run again, its reconciler was not asked, and the key goes on with a program that knows them, or when a person finishes
	// it.
	ErrUnknownRecoveryPoint = errors.New("the phases that are done do not begin this flow's list")
	// ErrUnanswered: the connection was lost during COMMIT, so nobody knows yet. Asking again under the same key finds
	// out.
	ErrUnanswered = errors.New("the database did not answer COMMIT: ask again with the same key")
	// ErrUnreadable: the request was executed, and this program cannot read the response that is stored: it was not given the key that
	// it was encrypted with (ErrUnknownSealKey), or no Config.Seal, or the text was changed. Asking again under the same key gives the
	// response where a program can read it; another key would have a second effect.
	ErrUnreadable = errors.New("the request with this idempotency key was executed, and its stored response cannot be read")
)

// InProgressError is an ErrInProgress that says when it is worth trying again.
type InProgressError struct{ RetryAfter time.Duration }

func (e *InProgressError) Error() string {
	return fmt.Sprintf("%v: try again in %v", ErrInProgress, e.RetryAfter)
}
func (e *InProgressError) Unwrap() error { return ErrInProgress }

// CrowdedError is an ErrInProgress of a key, or a tenant, for which as many requests of this process wait as may: see
// Config.KeyWaitersMax and Config.ScopeWaitersMax. Nothing was done, and the database was not asked.
type CrowdedError struct{ RetryAfter time.Duration }

func (e *CrowdedError) Error() string {
	return fmt.Sprintf("%v, and too many wait for it: try again in %v", ErrInProgress, e.RetryAfter)
}
func (e *CrowdedError) Unwrap() error { return ErrInProgress }

// QuotaError is what a new key gets where the tenant has as many keys stored as Config.ScopeKeysMax allows. Nothing was done.
type QuotaError struct {
	Max        int
	RetryAfter time.Duration
}

func (e *QuotaError) Error() string {
	return fmt.Sprintf("%d idempotency keys of one scope are stored, which is as many as may be: try again in %v", e.Max, e.RetryAfter)
}

// FinalError is what Final makes.
type FinalError struct {
	Response Response
	Err      error
}

func (e *FinalError) Error() string { return e.Err.Error() }
func (e *FinalError) Unwrap() error { return e.Err }

// Final says that the work failed for good (declined, invalid, not found): what it wrote is rolled back, and the
// response is stored as its outcome, and replayed. Once and Flow.Do return the response and no error.
func Final(response Response, err error) error { return &FinalError{response, reason(err)} }

// reason is the error of a verdict that was given without one.
func reason(err error) error {
	if err == nil {
		return errors.New("no reason was given")
	}
	return err
}

type indeterminateError struct{ err error }

func (e *indeterminateError) Error() string   { return e.err.Error() }
func (e *indeterminateError) Unwrap() []error { return []error{ErrIndeterminate, e.err} }

// Indeterminate says that a foreign system may have acted or not, and cannot be asked again under the same key: what the
// work or the phase wrote is rolled back, and the key stops until a person decides, or the reconciler of a flow. The mark is written after
// the fact: where the database, the connection or the process is gone in that moment, only a phase that is AtMostOnce is not run again: what must
// not be asked twice belongs into a Flow.
func Indeterminate(err error) error { return &indeterminateError{reason(err)} }

type notDoneError struct{ err error }

func (e *notDoneError) Error() string { return e.err.Error() }
func (e *notDoneError) Unwrap() error { return e.err }

// NotDone says that a foreign system certainly did nothing (refused, connection not made): a call of a phase that is
// AtMostOnce may be made again.
func NotDone(err error) error { return &notDoneError{reason(err)} }

// code is that of a refusal by the server, if it is one.
func code(err error) string {
	var refusal *pgconn.PgError
	if !errors.As(err, &refusal) {
		return ""
	}
	return refusal.Code
}

// conflict tells errors that end a transaction and are gone with the next: serialization failure and deadlock. What the
// work decided, or does not know, because of one is no conflict: it must not run again.
func conflict(err error) bool {
	var final *FinalError
	return (code(err) == "40001" || code(err) == "40P01") && !errors.Is(err, ErrIndeterminate) && !errors.As(err, &final)
}

// outage tells troubles of the server, which say nothing about a request: connection, resources, shutdown, its own errors.
func outage(err error) bool {
	refusal := code(err)
	return len(refusal) == 5 && slices.Contains([]string{"08", "53", "57", "58", "F0", "XX"}, refusal[:2])
}

// workError is one of the work, of a Call or of a Write, and not of what is around them. What the keys of another operation
// say, which the work used, it does not say of this one's: its key is neither used for another request nor in progress.
type workError struct{ err error }

func (e *workError) Error() string { return e.err.Error() }

// Is hides what only the engine says of a key.
func (e *workError) Is(target error) bool {
	switch target {
	case ErrMismatch, ErrInProgress, ErrAbandoned, ErrLockLost, ErrUnknownRecoveryPoint, ErrUnanswered, ErrUnreadable, ErrInvalid:
		return false
	case ErrIndeterminate:
		var unknown *indeterminateError
		return errors.As(e.err, &unknown)
	}
	return errors.Is(e.err, target)
}

// As does the same.
func (e *workError) As(target any) bool {
	switch target.(type) {
	case **InProgressError, **CrowdedError, **QuotaError:
		return false
	case **pgconn.PgError:
		if lost(e.err) {
			return false
		}
	}
	return errors.As(e.err, target)
}

func ofWork(err error) error {
	if err == nil {
		return nil
	}
	return &workError{err}
}

// waited tells a lock that was not to be had in time.
func waited(err error) bool { return code(err) == "55P03" }

// lost tells that advance_key or finish_key found another token, or the phase done.
func lost(err error) bool { return code(err) == "EO003" }

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
