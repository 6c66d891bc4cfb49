package idempotency

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/effectonce/effectonce/internal/pgerr"
)

// Response is the outcome of a request: what the client gets, now and at each retry. It need not be
// an HTTP response.
type Response struct {
	// Status 0, or 200 to 999: a status below 200 is not a final HTTP answer, and net/http panics
	// on one that is out of range.
	Status int
	// Header to replay, byte for byte. Set only headers that may be shown again. Headers that
	// NeverStored reports are not stored.
	Header map[string][]string
	// Body, at most Config.ResponseBytesMax; of a larger one only the fact that it was dropped is
	// stored.
	Body []byte

	// Replayed: the response was stored by an earlier execution.
	Replayed bool
	// BodyDropped: the response had a body that was too large to be stored.
	BodyDropped bool
}

// What Once and Flow.Do may find under a key instead of work to do.
var (
	// ErrMismatch: the key was used for another request. Nothing was done. Use another key.
	ErrMismatch = errors.New("the idempotency key was used for another request")
	// ErrInProgress: another request is executing under the key. Nothing was done; retry later. See
	// InProgressError.
	ErrInProgress = errors.New("a request with this idempotency key is in progress")
	// ErrIndeterminate: whether a foreign system acted is unknown, and it must not be called again:
	// a person or the reconciler decides. Retries get the same error until then.
	ErrIndeterminate = errors.New("the outcome of the request with this idempotency key is unknown: it has to be looked into")
	// ErrAbandoned: no phase was done for too long (FlowConfig.GiveUpAfter). A person decides.
	ErrAbandoned = errors.New("the request with this idempotency key was given up: it has to be looked into")
	// ErrLockLost: another worker took the key over, because this one did not renew its lock in
	// time. What this worker had not committed is rolled back.
	ErrLockLost = errors.New("the lock of the idempotency key is lost: another worker may have taken it over")
	// ErrUnknownRecoveryPoint: the phases that are done, and the one whose call may have been made, are
	// not the first ones of this program's list. Either another version with other phases ran them, or the key belongs to a flow with
	// another name. No phase was run, and the reconciler was not called. The key continues with a
	// program that knows its phases, or when a person finishes it.
	ErrUnknownRecoveryPoint = errors.New("the phases that are done do not begin this flow's list")
	// ErrUnanswered: the connection was lost during COMMIT, so the outcome is unknown. A retry with
	// the same key resolves it.
	ErrUnanswered = errors.New("the database did not answer COMMIT: retry with the same key")
	// ErrUnreadable: the key was used, and this program cannot read what is stored of it, or compare the
	// request with it. It lacks the encryption key (ErrUnknownSealKey) or Config.Seal, or the text was
	// changed. A retry with the same key is answered by a program that can read it; another key could
	// have a second effect.
	ErrUnreadable = errors.New("the idempotency key was used, and what is stored under it cannot be read")
)

// InProgressError is an ErrInProgress with the time after which a retry is worthwhile. Crowded: 100 requests of
// this process wait for the key, and no statement was sent to the database.
type InProgressError struct {
	RetryAfter time.Duration
	Crowded    bool
}

func (e *InProgressError) Error() string {
	if e.Crowded {
		return fmt.Sprintf("%v, and too many wait for it: try again in %v", ErrInProgress, e.RetryAfter)
	}
	return fmt.Sprintf("%v: try again in %v", ErrInProgress, e.RetryAfter)
}
func (e *InProgressError) Unwrap() error { return ErrInProgress }

// FinalError is the error that Final returns.
type FinalError struct {
	Response Response
	Err      error
}

func (e *FinalError) Error() string { return e.Err.Error() }
func (e *FinalError) Unwrap() error { return e.Err }

// Final marks a failure of the work as final (declined, invalid, not found): its writes are rolled
// back, and the response is stored as the outcome, and replayed. Once and Flow.Do return the
// response and no error.
func Final(response Response, err error) error { return &FinalError{response, reason(err)} }

// reason replaces a nil error of a verdict.
func reason(err error) error {
	if err == nil {
		return errors.New("no reason was given")
	}
	return err
}

type indeterminateError struct{ err error }

func (e *indeterminateError) Error() string   { return e.err.Error() }
func (e *indeterminateError) Unwrap() []error { return []error{ErrIndeterminate, e.err} }

// Indeterminate means that a foreign system may have acted or not, and cannot be called again under
// the same key. The writes of the work or the phase are rolled back, and the key stops until a
// person, or the reconciler of a flow, decides. The mark is written afterwards: if the database,
// the connection or the process fails at that moment, only an AtMostOnce phase is not run again. So
// calls that must not be repeated belong in a Flow.
func Indeterminate(err error) error { return &indeterminateError{reason(err)} }

type notDoneError struct{ err error }

func (e *notDoneError) Error() string { return e.err.Error() }
func (e *notDoneError) Unwrap() error { return e.err }

// NotDone means that a foreign system certainly did nothing (refused, connection not made): a call
// of an AtMostOnce phase may be repeated.
func NotDone(err error) error { return &notDoneError{reason(err)} }

// ErrExpired is for work, and phases of a flow, that find effects of an earlier execution of the
// request: the client retried after Config.Window, when the key was forgotten. Their writes are
// rolled back, the response that Config.Failed makes for ErrExpired is stored as the outcome
// (httpkey: 410), and Once and Flow.Do return it without an error.
//
// Work finds them by its own rows: it inserts one under Key.ChildID with ON CONFLICT DO NOTHING, and
// returns ErrExpired if none was inserted. In a flow a foreign system may have been called again before:
// then the key is indeterminate. To avoid that, insert the row in a phase before all calls.
var ErrExpired = errors.New("the request was executed before, and its idempotency key is forgotten")

// expired turns ErrExpired into an outcome.
func (o *Operation) expired(ctx context.Context, key Key, cause error) error {
	var final *FinalError
	if !errors.Is(cause, ErrExpired) || errors.As(cause, &final) || errors.Is(cause, ErrIndeterminate) {
		return cause
	}
	o.cfg.Logger.WarnContext(ctx, "a request was retried after its key was forgotten; it is not executed again", "key", key, "error", cause)
	return Final(o.cfg.Failed(cause), cause)
}

// conflict reports errors that end a transaction and that a retry resolves: serialization failure
// and deadlock. An Indeterminate or Final verdict caused by one is not a conflict: the work must
// not run again.
func conflict(err error) bool {
	var final *FinalError
	return pgerr.Is(err, pgerr.SerializationFailure, pgerr.Deadlock) && !errors.Is(err, ErrIndeterminate) && !errors.As(err, &final)
}

// outage reports failures that do not depend on the request: of the server (connection, resources,
// shutdown, internal errors), and of a transaction that was idle for too long. A statement that took too
// long is the request's.
func outage(err error) bool {
	return pgerr.OfServer(err) || pgerr.InClass(err, "F0", "XX") || pgerr.Is(err, pgerr.IdleTransactionTimeout, pgerr.TransactionTimeout)
}

// workError is an error of the work, of a Call or of a Write, and not of the engine. If the work
// used keys of another operation, errors about those keys must not be taken for errors about this
// key: this key is neither used for another request nor in progress.
type workError struct{ err error }

func (e *workError) Error() string { return e.err.Error() }

// Is hides the errors by which only the engine describes a key.
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

// As hides their types.
func (e *workError) As(target any) bool {
	switch target.(type) {
	case **InProgressError:
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

// lost reports that advance_key or finish_key found another token, or the phase done.
func lost(err error) bool { return pgerr.Is(err, pgerr.KeyLost) }

// text returns an error as it is stored.
func text(err error) string {
	return fmt.Sprintf("%.2000s", strings.ReplaceAll(strings.ToValidUTF8(err.Error(), "\uFFFD"), "\x00", ""))
}
