package idempotency

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/effectonce/effectonce/internal/crashpoint"
)

// Once executes work under a key, in one transaction with the key: both are committed, or neither. Another request
// with the same key waits at most WaitMax for it, and then gets the same response with Replayed set, or ErrInProgress.
//
// work may run more than once (after a serialization failure, a deadlock, an attempt that failed): its effects are those
// of one execution, as long as all of them go through tx, which it must not commit or roll back. Publish outbox messages
// under key.ChildID, so that they keep their IDs. What must be asked of another system belongs into a Flow.
//
// An error of the work rolls everything back, and frees the key at once; Final stores a response without effects. Errors
// that wrap ErrMismatch, ErrInProgress, ErrAbandoned and ErrInvalid mean that the work did not run. After ErrUnanswered
// nobody knows yet: ask again with the same key. Trying again is safe after every error.
func (o *Operation) Once(ctx context.Context, key Key, work func(ctx context.Context, tx pgx.Tx) (Response, error)) (Response, error) {
	key, err := o.complete(key)
	if err != nil {
		return o.answered(Response{}, err)
	}
	for attempt := 1; ; attempt++ {
		response, err := o.once(ctx, key, work)
		if err == nil || attempt > o.cfg.Retries || !conflict(err) {
			return o.answered(response, err)
		}
		if !pause(ctx, rand.N(time.Duration(attempt)*10*time.Millisecond)) { //nolint:gosec // jitter needs no secret
			return o.answered(Response{}, ctx.Err())
		}
	}
}

// once is one execution of the transaction.
func (o *Operation) once(ctx context.Context, key Key, work func(ctx context.Context, tx pgx.Tx) (Response, error)) (Response, error) {
	t, replayed, err := o.claimWork(ctx, key)
	if t == nil {
		return replayed, err
	}
	defer t.end(ctx)
	crashpoint.At(ctx, crashpoint.KeyClaimed)
	var response Response
	err = t.run(ctx, func(ctx context.Context, tx pgx.Tx) (err error) {
		response, err = work(ctx, tx)
		return ofWork(err)
	})
	away := t.conn.IsClosed() // asked here: behind end the connection is somebody else's
	crashpoint.At(ctx, crashpoint.KeyWorked)
	if err == nil {
		err = ctx.Err()
	}
	var final *FinalError
	var unknown *indeterminateError
	switch {
	case err == nil:
		if err = o.respond(ctx, t, key, response); err == nil {
			return response, nil
		}
		if code(err) == "" || conflict(err) || outage(err) || errors.Is(err, errEnded) {
			return Response{}, err
		}
		return o.failed(ctx, key, err) // of a deferred constraint
	case errors.As(err, &final):
		t.end(ctx)
		return o.settle(ctx, key, final.Response)
	case errors.As(err, &unknown):
		t.end(ctx)
		return Response{}, errors.Join(err, o.doubt(ctx, key, err))
	case conflict(err), ctx.Err() != nil:
		return Response{}, err
	}
	t.end(ctx)
	switch {
	case errors.Is(err, errEnded):
		if o.unanswered(ctx, key) {
			return Response{}, errors.Join(ErrIndeterminate, err)
		}
		return Response{}, err
	case away || outage(err):
		return Response{}, err
	}
	return o.failed(ctx, key, err)
}

// claimWork begins the transaction of the work. Without one it returns what the key says.
func (o *Operation) claimWork(ctx context.Context, key Key) (*transaction, Response, error) {
	args := []any{key.Scope, key.Operation, key.Value, o.cfg.Seal != nil, o.window(), millis(o.cfg.LockTimeout)}
	args = slices.Clip(args) // what is appended is not shared
	for range claimsMax {
		t, took, err := o.take(ctx, key, o.sql.work.claim, append(args, key.Fingerprint[:])...)
		if took || err != nil {
			return t, Response{}, err
		}
		s, err := t.instead(ctx, key)
		if err != nil {
			return nil, Response{}, err
		}
		if s == nil {
			continue // it was forgotten
		}
		if s.state == finished && s.unfinished {
			o.unanswered(ctx, key)
		}
		if response, ok, err := o.answer(key, s); ok {
			return nil, response, err
		}
		if len(s.phases) > 0 || s.calling != nil {
			return nil, Response{}, fmt.Errorf("%w: the key was begun as a flow, in phases", ErrUnknownRecoveryPoint)
		}
		t, took, err = o.take(ctx, key, o.sql.work.take, append(args, s.token, s.fingerprint[:])...)
		if took || err != nil {
			return t, Response{}, err
		}
		t.end(ctx)
	}
	return nil, Response{}, &InProgressError{RetryAfter: time.Second} // it changes hands all the time
}

// take begins a transaction with a statement that takes a key, and tells whether it did. It waits at most WaitMax for
// whoever has it.
func (o *Operation) take(ctx context.Context, key Key, sql string, args ...any) (t *transaction, took bool, err error) {
	t, err = o.begin(ctx, func(batch *pgx.Batch) {
		o.limits(batch, o.cfg.WaitMax)
		batch.Queue(sql, args...).Exec(func(tag pgconn.CommandTag) error { took = tag.RowsAffected() == 1; return nil })
	})
	switch {
	case waited(err), code(err) == "57014" && ctx.Err() == nil: // where WaitMax is as long as StatementTimeout
		return nil, false, &InProgressError{RetryAfter: time.Second}
	case err != nil:
		return nil, false, fmt.Errorf("claim %v: %w", key, err)
	}
	return t, took, nil
}

// instead ends a transaction that claimed nothing, and looks what there is, in one round trip.
func (t *transaction) instead(ctx context.Context, key Key) (s *stored, err error) {
	defer t.end(ctx)
	batch := &pgx.Batch{}
	batch.Queue("ROLLBACK")
	batch.Queue(t.o.sql.look, key.Scope, key.Operation, key.Value).QueryRow(func(row pgx.Row) (err error) { s, err = read(row); return err })
	if err := t.conn.SendBatch(ctx, batch).Close(); err != nil {
		return nil, fmt.Errorf("look at %v: %w", key, err)
	}
	return s, nil
}

// claimsMax bounds how often a claim that met a change is made again.
const claimsMax = 10

// respond stores the response and commits.
func (o *Operation) respond(ctx context.Context, t *transaction, key Key, response Response) error {
	out, err := o.outcome(key, response, o.cfg.Seal != nil)
	if err != nil {
		return err
	}
	crashpoint.At(ctx, crashpoint.KeyCommitting)
	err = t.commit(ctx, func(batch *pgx.Batch) {
		batch.Queue(o.sql.work.respond, key.Scope, key.Operation, key.Value, out.status, out.headers, out.body, out.dropped, o.window()).
			QueryRow(func(row pgx.Row) error {
				err := row.Scan(nil)
				if code(err) == "22012" { // it is another transaction than the one that claimed, and the server skips COMMIT
					return errEnded
				}
				return err
			})
	})
	if err != nil {
		return fmt.Errorf("commit %v: %w", key, err)
	}
	crashpoint.At(ctx, crashpoint.KeyCommitted)
	return nil
}

// settle stores an outcome without effects. Whoever was first counts.
func (o *Operation) settle(ctx context.Context, key Key, response Response) (Response, error) {
	t, replayed, err := o.claimWork(ctx, key)
	if t == nil {
		return replayed, err
	}
	defer t.end(ctx)
	return response, o.respond(ctx, t, key, response)
}

// doubt marks the key of work that asked another system, and does not know what became of it: a person decides. Where
// a request that waited executes the same work by now, that has to end first.
func (o *Operation) doubt(ctx context.Context, key Key, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), o.cfg.StatementTimeout)
	defer cancel()
	for {
		err := o.mark(ctx, key, cause)
		if err == nil || !errors.Is(err, ErrInProgress) && !conflict(err) || !pause(ctx, askEvery) {
			return ofWork(err) // it says nothing else of the key than that the mark is not there
		}
	}
}

func (o *Operation) mark(ctx context.Context, key Key, cause error) error {
	t, _, err := o.claimWork(ctx, key)
	if err != nil {
		return fmt.Errorf("mark %v as %s: %w", key, indeterminate, err)
	}
	if t == nil {
		o.cfg.Logger.ErrorContext(ctx, "a request that waited for work in doubt executed it again, and stored its outcome: look whether the other system acted twice", "key", key, "error", cause)
		return nil
	}
	defer t.end(ctx)
	err = t.commit(ctx, func(batch *pgx.Batch) {
		batch.Queue(o.sql.work.doubt, key.Scope, key.Operation, key.Value, text(cause))
	})
	if err != nil {
		return fmt.Errorf("mark %v as %s: %w", key, indeterminate, err)
	}
	o.cfg.Logger.ErrorContext(ctx, "a key needs a person: see outbox-relay keys", "key", key, "state", indeterminate, "error", cause)
	return nil
}

// failed is a failure that trying again could mend: it stores nothing, unless it is to be the outcome.
func (o *Operation) failed(ctx context.Context, key Key, cause error) (Response, error) {
	if o.cfg.Strict {
		return o.settle(ctx, key, o.cfg.Failed(cause))
	}
	if o.cfg.AttemptsMax == 0 {
		return Response{}, cause
	}
	attempts, err := o.attempted(ctx, key, cause)
	switch {
	case errors.Is(err, pgx.ErrNoRows), waited(err): // somebody else has made something of the key, or is about to
		return Response{}, cause
	case err != nil:
		return Response{}, errors.Join(cause, fmt.Errorf("count the attempt at %v: %w", key, err))
	case attempts < o.cfg.AttemptsMax:
		return Response{}, cause
	}
	return o.settle(ctx, key, o.cfg.Failed(cause))
}

// attempted counts a failure, and tells how many there were. It waits as a claim does for whoever has the key by now.
func (o *Operation) attempted(ctx context.Context, key Key, cause error) (attempts int, err error) {
	t, err := o.begin(ctx, func(batch *pgx.Batch) {
		o.limits(batch, o.cfg.WaitMax)
		batch.Queue(o.sql.work.failed, key.Scope, key.Operation, key.Value, key.Fingerprint[:], o.cfg.Seal != nil, text(cause)).
			QueryRow(func(row pgx.Row) error { return row.Scan(&attempts) })
	})
	if err != nil {
		return 0, err
	}
	defer t.end(ctx)
	return attempts, t.commit(ctx, func(*pgx.Batch) {})
}
