package consumer

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/migrations"
)

// Permanent marks an error that trying again cannot mend: the message itself is at fault. It is parked at
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

// wrapPosition recognises what advance_position raises.
func wrapPosition(err error) error {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == "EO001" {
		return fmt.Errorf("%w: %w", errFenced, err)
	}
	return err
}

// errConnectionLost is added to the error of a handler whose connection broke under it.
var errConnectionLost = errors.New("database connection lost")

// troubleOfDatabase tells failures of the database, or of the way to it, from those of a message. They
// are waited out and never counted as attempts. What a handler returns counts only if it comes from the
// database: its own network calls are its own.
func troubleOfDatabase(err error) bool {
	if errors.Is(err, errIdle) {
		return false
	}
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		switch pgErr.Code[:2] {
		case "08", "53", "57", "58":
			return pgErr.Code != "57014" // query_canceled: a statement timeout is the statement's
		}
		return pgErr.Code == "25006" // read-only: failed over
	}
	var connectErr *pgconn.ConnectError
	if errors.As(err, &connectErr) || errors.Is(err, errConnectionLost) {
		return true
	}
	var failed *messageError
	var batch *batchError
	for _, own := range []error{errGoexit, migrations.ErrTooOld, migrations.ErrTooNew, dedup.ErrNameTaken, ErrNotPrimary} {
		if errors.Is(err, own) {
			return false
		}
	}
	return !errors.As(err, &failed) && !errors.As(err, &batch) && !IsPermanent(err)
}

// concurrent tells that the engine's own statements met another transaction: a claim or a position that
// somebody else holds, or a serialization failure at COMMIT. A new transaction resolves it.
func concurrent(err error) bool {
	var failed *messageError
	var batch *batchError
	if errors.As(err, &failed) || errors.As(err, &batch) {
		return false
	}
	var pgErr *pgconn.PgError
	return errors.Is(err, dedup.ErrRetry) || errors.As(err, &pgErr) && strings.HasPrefix(pgErr.Code, "40")
}

// endedByHandler recognises what the server says when a handler ends the transaction behind the engine's
// back: its own COMMIT is refused by refuse_commit, and after its ROLLBACK the engine's cursor is not there.
func endedByHandler(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && (pgErr.Code == "EO002" || pgErr.Code == "34000" && strings.Contains(pgErr.Message, guardCursor))
}

// judge says whether trying again can mend an error, and if not, under which reason its message is parked.
func (e *engine) judge(err error) (reason string, permanent bool) {
	var pgErr *pgconn.PgError
	switch {
	case isUndecodable(err):
		return reasonUndecodable, true
	case isUnknownType(err):
		return reasonUnknownType, true
	case IsPermanent(err):
		return reasonPermanent, true
	case errors.As(err, &pgErr) && slices.ContainsFunc(e.cfg.PermanentStates, func(state string) bool { return strings.HasPrefix(pgErr.Code, state) }):
		return reasonPermanent, true
	}
	return reasonFailed, false
}
