package keys

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/migrations"
)

// RefusedError means that the requested action does not apply to the key in its state. Nothing was
// changed.
type RefusedError struct{ Remedy string }

func (e *RefusedError) Error() string { return e.Remedy }

// Changed is a key before and after an action.
type Changed struct {
	Was Row  `json:"was"`
	Now *Row `json:"now"` // null: it is forgotten, and the next request executes it from the start
}

// Unlock ends the lock of a running key now. Its holder can store nothing afterwards, and the next
// request, or the completer, continues from the recovery point. If a call that must not be made
// twice was in progress, the next one makes the key indeterminate instead. An error means that
// nothing was changed, unless the connection broke during COMMIT; a repeated call is refused then.
// The same holds for repeated calls of Retry and Finish.
func Unlock(ctx context.Context, db operator.Beginner, schema string, by operator.By, place Place) (*Changed, error) {
	return change{what: "key.unlock", sql: unlockSQL}.act(ctx, db, schema, by, place)
}

// Call is what a person found out about a call that may have been made.
type Call string

// What Retry is told about the call.
const (
	CallUnknown      Call = ""
	CallDidNotHappen Call = "did not happen" // it is made again
	CallHappened     Call = "happened"       // the Write of its phase comes next, with the state from before the call
)

// Retry makes an indeterminate or abandoned key run again: the next request, or the completer,
// continues from its recovery point. A key of work in one transaction is forgotten for that. Retry is
// refused for CallUnknown if the key is indeterminate, or a call that must not be made twice may have been
// made, and for CallHappened if none may have been made. Errors are as in Unlock.
func Retry(ctx context.Context, db operator.Beginner, schema string, by operator.By, place Place, call Call) (*Changed, error) {
	return retry(call, nil).act(ctx, db, schema, by, place)
}

func retry(call Call, token *int64) change {
	return change{
		what: "key.retry", sql: retrySQL,
		args: []any{call == CallDidNotHappen, call == CallHappened}, forgets: call != CallHappened,
		note:  map[string]any{"call_did_not_happen": call == CallDidNotHappen, "call_happened": call == CallHappened},
		token: token,
	}
}

// Report is what RetryAll did.
type Report struct {
	Done int    `json:"done"`
	Left []Left `json:"left"`
}

// Left is a key that RetryAll left alone.
type Left struct {
	Place
	Why string `json:"why"`
}

// RetryMax bounds how many keys RetryAll handles.
const RetryMax = 100_000

// RetryAll is Retry for all keys that match, the newest first, each in a transaction of its own. A key is
// decided as it is listed: one that changed since then is left alone, and so is one whose call may still
// be on its way, or that is in doubt where call does not say what happened. After an error, the report says what was done.
func RetryAll(ctx context.Context, db *pgxpool.Pool, schema string, by operator.By, filter Filter, call Call, progress func(done int)) (*Report, error) {
	report := &Report{Left: []Left{}}
	rows, err := List(ctx, db, schema, filter, RetryMax)
	for _, r := range rows {
		if r.OnItsWay() {
			report.Left = append(report.Left, Left{r.Place, "its call may be on its way until " + r.RetryAt.UTC().Format(time.RFC3339)})
			continue
		}
		var refused *RefusedError
		switch _, err := retry(call, &r.LockToken).act(ctx, db, schema, by, r.Place); {
		case err == nil:
			report.Done++
		case errors.As(err, &refused):
			report.Left = append(report.Left, Left{r.Place, refused.Remedy})
		case !errors.Is(err, ErrNotFound):
			return report, err
		}
		progress(report.Done)
	}
	return report, err
}

// Finish records that the request of a key happened, or never will. Every later request with the
// key gets this outcome. It works for indeterminate and abandoned keys, and for running keys that
// no worker holds. Errors are as in Unlock.
func Finish(ctx context.Context, db operator.Beginner, schema string, by operator.By, place Place, outcome Outcome) (*Changed, error) {
	var headers []byte // null: none
	if len(outcome.Header) > 0 {
		var err error
		if headers, err = json.Marshal(outcome.Header); err != nil {
			return nil, err
		}
	}
	return change{
		what: "key.finish", sql: finishSQL,
		args: []any{outcome.Status, headers, outcome.Body, outcome.Window}, note: map[string]any{"status": outcome.Status, "body_bytes": len(outcome.Body)},
	}.act(ctx, db, schema, by, place)
}

// change is one kind of action.
type change struct {
	what    string
	sql     string // Place's columns, then args
	args    []any
	forgets bool           // a key of work in one transaction
	token   *int64         // the key's lock token, which changes with each decision; nil: any
	note    map[string]any // recorded in addition to the key's state
}

// act runs one transaction: it locks the key, lets the database decide, and records the action.
func (c change) act(ctx context.Context, db operator.Beginner, schema string, by operator.By, place Place) (*Changed, error) {
	var was Row
	var now *Row
	err := operator.Change(ctx, db, func(tx pgx.Tx, _ time.Time) (err error) {
		if was, err = lock(ctx, tx, schema, place); err != nil {
			return err
		}
		if c.token != nil && was.LockToken != *c.token {
			return &RefusedError{"it changed meanwhile"}
		}
		sql, args := c.sql, append([]any{place.Scope, place.Operation, place.Key}, c.args...)
		if c.forgets && was.Flow == nil {
			sql, args = forgetSQL, args[:4]
		}
		done, err := tx.Exec(ctx, migrations.InSchema(sql, schema), args...)
		if err != nil {
			return err
		}
		if done.RowsAffected() == 0 {
			return &RefusedError{refusal(was)}
		}
		if err := operator.Note(ctx, tx, schema, by, c.what, c.subject(was)); err != nil {
			return err
		}
		if left, err := lock(ctx, tx, schema, place); err == nil {
			now = &left
		} else if !errors.Is(err, ErrNotFound) {
			return err
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("%s of scope %q (%s): %w", place.Operation, place.Scope, was.Mark, err)
	}
	return &Changed{was, now}, nil
}

// lock locks a key, and returns it as it is then.
func lock(ctx context.Context, tx pgx.Tx, schema string, place Place) (Row, error) {
	rows, err := read(ctx, tx, schema, lockSQL, place.Scope, place.Operation, place.Key)
	if err != nil {
		return Row{}, err
	}
	if len(rows) == 0 {
		return Row{}, ErrNotFound
	}
	return rows[0], nil
}

// subject is what is recorded of a key: never its value, the request or the answer.
func (c change) subject(was Row) map[string]any {
	subject := map[string]any{
		"scope": was.Scope, "operation": was.Operation, "key_sha256": fmt.Sprintf("%x", sha256.Sum256([]byte(was.Key))),
		"mark": was.Mark, "state": was.State, "phases": was.Phases, "calling": was.Calling, "lock_token": was.LockToken, "locked_by": was.LockedBy,
		"attempts": was.Attempts, "error": was.Error, "created_at": was.CreatedAt,
	}
	for name, value := range c.note {
		subject[name] = value
	}
	return subject
}

// refusal says why an action does not apply to a key; what to find out, and the commands, are in
// "keys show".
func refusal(was Row) string {
	switch {
	case was.State == Finished:
		return "it is finished, and its outcome is never changed: \"outbox-relay keys show\" shows it"
	case was.Locked:
		holder := "a worker"
		if was.LockedBy != nil {
			holder = fmt.Sprintf("%q", *was.LockedBy)
		}
		return holder + " works on it: wait; if that hangs, \"outbox-relay keys unlock\" ends the lock first"
	case was.State == Running:
		return "it is running, and its lock is free: the next request, or the completer, continues it"
	}
	return "it is " + was.State + ", so its lock is free, and a person decides: \"outbox-relay keys show\" has what to find out first, and the commands"
}

// Outcome is what every request gets from now on.
type Outcome struct {
	Status int
	Header map[string][]string // UTF-8, and none for which idempotency.NeverStored is true
	Body   []byte
	Window *time.Duration // how long it is remembered; nil: forever
}
