package keys

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/effectonce/effectonce/internal/operator"
)

// RefusedError means that what was asked for makes no sense for the key as it is. Nothing was changed.
type RefusedError struct {
	Row    Row // as it was, locked
	Remedy string
}

func (e *RefusedError) Error() string { return e.Remedy }

// Changed is a key before and after an action.
type Changed struct {
	Was Row `json:"was"`
	Now Row `json:"now"`
}

// Unlock ends the lock of a running key now. Whoever holds it can store nothing afterwards, and the next request, or
// the completer, goes on from the recovery point; if a call was under way that must not be made twice, the key becomes
// indeterminate then. An error means that nothing was changed, unless the connection
// broke during COMMIT; a repeated call is refused then, and so are those of Retry and Finish.
func Unlock(ctx context.Context, db operator.Beginner, schema string, by operator.By, place Place) (*Changed, error) {
	return change{what: "key.unlock", sql: unlockSQL, remedy: unlockRemedy}.act(ctx, db, schema, by, place)
}

// Retry says of an indeterminate or abandoned key that it did not happen: it is running again, and goes on from its
// recovery point with the next request, or by the completer. Where a call that must not be made twice may be under way
// (Row.Calling), that is refused unless callDidNotHappen. Errors as in Unlock.
func Retry(ctx context.Context, db operator.Beginner, schema string, by operator.By, place Place, callDidNotHappen bool) (*Changed, error) {
	return change{
		what: "key.retry", sql: retrySQL, remedy: retryRemedy,
		args: []any{callDidNotHappen}, note: map[string]any{"call_did_not_happen": callDidNotHappen},
	}.act(ctx, db, schema, by, place)
}

// Finish says of a key that it happened, or will never: its outcome is what every request with it gets. It works for
// indeterminate and abandoned keys, and for running ones that nobody holds. Errors as in Unlock.
func Finish(ctx context.Context, db operator.Beginner, schema string, by operator.By, place Place, outcome Outcome) (*Changed, error) {
	headers, err := writeHeaders(outcome.Header)
	if err != nil {
		return nil, err
	}
	return change{
		what: "key.finish", sql: finishSQL, remedy: finishRemedy,
		args: []any{outcome.Status, headers, outcome.Body, outcome.Window}, note: map[string]any{"status": outcome.Status, "body_bytes": len(outcome.Body)},
	}.act(ctx, db, schema, by, place)
}

// change is one kind of action.
type change struct {
	what   string
	sql    string // Place's columns, then args
	args   []any
	note   map[string]any   // to write down besides what the key was
	remedy func(Row) string // for a key that sql leaves alone
}

// act runs one transaction: lock, let the database decide, write it down.
func (c change) act(ctx context.Context, db operator.Beginner, schema string, by operator.By, place Place) (*Changed, error) {
	var was, now Row
	// Read committed, whatever the role's default is: what follows the lock has to see what came before it.
	err := pgx.BeginTxFunc(ctx, db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
		if err := operator.Limit(ctx, tx); err != nil {
			return err
		}
		var err error
		if was, err = lock(ctx, tx, schema, place); err != nil {
			return err
		}
		done, err := tx.Exec(ctx, inSchema(c.sql, schema), append([]any{place.Scope, place.Operation, place.Key}, c.args...)...)
		if err != nil {
			return err
		}
		if done.RowsAffected() == 0 {
			return &RefusedError{was, c.remedy(was)}
		}
		subject, err := json.Marshal(c.subject(was))
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, inSchema(noteSQL, schema), place.Scope, place.Operation, place.Key, by.Who, c.what, by.Why, string(subject))
		if err != nil {
			return err
		}
		now, err = lock(ctx, tx, schema, place)
		return err
	})
	var refused *pgconn.PgError
	if errors.As(err, &refused) && (refused.Code == "55P03" || refused.Code == "40P01") {
		err = fmt.Errorf("%w (%s)", operator.ErrBusy, refused.Code)
	}
	if err != nil {
		return nil, fmt.Errorf("%s of scope %q (%s): %w", place.Operation, place.Scope, was.Mark, err)
	}
	return &Changed{was, now}, nil
}

// lock returns a key as it is, once nobody else changes it.
func lock(ctx context.Context, tx pgx.Tx, schema string, place Place) (Row, error) {
	rows, err := tx.Query(ctx, inSchema(lockSQL, schema), place.Scope, place.Operation, place.Key)
	if err != nil {
		return Row{}, err
	}
	row, err := pgx.CollectExactlyOneRow(rows, scanRow)
	if errors.Is(err, pgx.ErrNoRows) {
		return Row{}, ErrNotFound
	}
	return row, err
}

// subject is what is written down of a key: never its value, nor what was asked and answered.
func (c change) subject(was Row) map[string]any {
	subject := map[string]any{
		"mark": was.Mark, "state": was.State, "phases": was.Phases, "calling": was.Calling, "lock_token": was.LockToken, "locked_by": was.LockedBy,
		"attempts": was.Attempts, "error": was.Error, "created_at": was.CreatedAt,
	}
	for name, value := range c.note {
		subject[name] = value
	}
	return subject
}

const hasOutcome = "it is finished, and its outcome is never changed: \"outbox-relay keys show\" shows it"

func unlockRemedy(was Row) string {
	switch was.State {
	case Finished:
		return hasOutcome
	case Running:
		return "nobody holds its lock: " + goesOn(was)
	}
	return "it is " + was.State + ", so that nobody holds its lock: decide with \"outbox-relay keys retry\" or \"keys finish\"; \"keys show\" says what to find out first"
}

func retryRemedy(was Row) string {
	switch {
	case was.State == Finished:
		return hasOutcome
	case was.Locked:
		return fmt.Sprintf("%s works on it: \"outbox-relay keys unlock\" ends the lock", holder(was))
	case was.State != Running:
		return fmt.Sprintf("the call of phase %q may have been made, and must not be made twice: ask the foreign system (the child ID of the phase is %v); "+
			"if it did nothing, add --call-did-not-happen; if it acted, \"outbox-relay keys finish\"", *was.Calling, was.ChildID(*was.Calling))
	}
	return "it is running already: " + goesOn(was)
}

// goesOn says what the next request does with a running key that nobody holds.
func goesOn(was Row) string {
	if was.Calling == nil {
		return "the next request, or the completer, goes on with it"
	}
	return fmt.Sprintf("the next request, or the completer, makes it indeterminate, since the call of phase %q (child ID %v) may have been made", *was.Calling, was.ChildID(*was.Calling))
}

func finishRemedy(was Row) string {
	if was.State == Finished {
		return hasOutcome
	}
	return fmt.Sprintf("%s works on it: \"outbox-relay keys unlock\" ends the lock first", holder(was))
}

func holder(was Row) string {
	if was.LockedBy == nil {
		return "somebody"
	}
	return fmt.Sprintf("%q", *was.LockedBy)
}
