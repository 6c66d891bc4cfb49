// Package pgerr classifies errors of PostgreSQL by their SQLSTATE.
//
// https://www.postgresql.org/docs/current/errcodes-appendix.html
package pgerr

import (
	"errors"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// States on which the code branches.
const (
	FeatureNotSupported     = "0A000"
	DivisionByZero          = "22012"
	UniqueViolation         = "23505"
	ReadOnlyTransaction     = "25006"
	FailedTransaction       = "25P02"
	IdleTransactionTimeout  = "25P03"
	TransactionTimeout      = "25P04"
	InvalidRole             = "28000"
	InvalidPassword         = "28P01"
	UnknownCursor           = "34000"
	UnknownSavepoint        = "3B001"
	UnknownSchema           = "3F000"
	SerializationFailure    = "40001"
	Deadlock                = "40P01"
	InsufficientPrivilege   = "42501"
	UndefinedObject         = "42704"
	DuplicateObject         = "42710"
	UndefinedFunction       = "42883"
	UndefinedTable          = "42P01"
	DuplicateSchema         = "42P06"
	DuplicateTable          = "42P07"
	TooManyConnections      = "53300"
	WrongState              = "55000" // object_not_in_prerequisite_state
	LockNotAvailable        = "55P03"
	QueryCanceled           = "57014"
	CannotConnectNow        = "57P03"
	TransactionEndedByOther = "EO002" // ours: see refuse_commit in migrations
	KeyLost                 = "EO003" // ours: see advance_key in migrations
)

// State returns the SQLSTATE of the server's error in err; empty: err is not an error from the
// server.
func State(err error) string {
	var refusal *pgconn.PgError
	if errors.As(err, &refusal) {
		return refusal.Code
	}
	return ""
}

// Is reports whether the server's error in err has one of these states.
func Is(err error, states ...string) bool {
	state := State(err)
	return state != "" && slices.Contains(states, state)
}

// InClass reports whether the state of the server's error in err begins with one of these classes
// of two letters.
func InClass(err error, classes ...string) bool {
	state := State(err)
	return len(state) == 5 && slices.Contains(classes, state[:2])
}

// OfServer reports errors that concern the server, or PgBouncer before it, and not a statement. A
// statement that took too long concerns the statement.
func OfServer(err error) bool {
	return InClass(err, "08", "53", "57", "58") && !Is(err, QueryCanceled)
}

// Unavailable reports errors of OfServer that end when the server is available: it starts, stops, has no
// connection, memory or disk left, or cannot be reached.
func Unavailable(err error) bool { return OfServer(err) && !refusedByPooler(err) }

// protocolViolation is the state of most of PgBouncer's own errors.
const protocolViolation = "08P01"

// refusedByPooler reports what PgBouncer refuses because of a setting: waiting does not help. Only the
// text says so.
func refusedByPooler(err error) bool {
	var refusal *pgconn.PgError
	return errors.As(err, &refusal) && refusal.Code == protocolViolation &&
		slices.ContainsFunc([]string{"authentication failed", "no such user", "no such database", "unsupported startup parameter"}, func(text string) bool {
			return strings.Contains(refusal.Message, text)
		})
}

// LockConflict reports whether a lock was not granted in time, or was part of a deadlock.
func LockConflict(err error) bool { return Is(err, LockNotAvailable, Deadlock) }

// Transient reports errors that a new transaction resolves: lock conflicts and serialization
// failures.
func Transient(err error) bool { return Is(err, SerializationFailure, LockNotAvailable, Deadlock) }
