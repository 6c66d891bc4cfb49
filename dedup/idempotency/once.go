package idempotency

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/crashpoint"
)

// Once executes work under a key, in one transaction with the key: both are committed, or neither. Another request
// with the same key waits at most WaitMax for it, and then gets the same response with Replayed set, or ErrInProgress.
//
// work may run more than once (after a serialization failure, a deadlock, an attempt that failed): its effects are those
// of one execution, as long as all of them go through tx, which it must not commit or roll back. Publish outbox messages
// under key.ChildID, so that they keep their IDs. What must be asked of another system belongs into a Flow.
//
// An error of the work rolls everything back, and frees the key at once; Final stores a response without effects, in the
// same transaction, so that no request that waits executes it again. The one exception is work that lost its connection, as
// pgx does where ctx ends within a statement: its claim is gone with it, and the outcome of a request that executed meanwhile
// counts. Errors
// that wrap ErrMismatch, ErrInProgress, ErrAbandoned and ErrInvalid mean that the work did not run. After ErrUnanswered
// nobody knows yet: ask again with the same key. Trying again is safe after every error.
func (o *Operation) Once(ctx context.Context, key Key, work func(ctx context.Context, tx pgx.Tx) (Response, error)) (Response, error) {
	key, err := o.complete(key)
	if err != nil {
		return o.answered(Response{}, err)
	}
	return o.answered(o.inTurn(ctx, key, func(wait time.Duration) (Response, error) {
		for attempt := 1; ; attempt++ {
			response, err := o.once(ctx, key, wait, work)
			if err == nil || attempt > o.cfg.Retries || !conflict(err) {
				return response, err
			}
			if !pause(ctx, rand.N(time.Duration(attempt)*10*time.Millisecond)) { //nolint:gosec // jitter needs no secret
				return Response{}, ctx.Err()
			}
		}
	}))
}

// once is one execution of the transaction.
func (o *Operation) once(ctx context.Context, key Key, wait time.Duration, work func(ctx context.Context, tx pgx.Tx) (Response, error)) (Response, error) {
	t, replayed, err := o.claimWork(ctx, key, wait)
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
	crashpoint.At(ctx, crashpoint.KeyWorked)
	if err == nil {
		err = ctx.Err()
	}
	if err == nil {
		if err = o.respond(ctx, t, key, response); err == nil {
			return response, nil
		}
		if code(err) == "" { // it is not known, or not of the work
			return Response{}, err
		}
	}
	if ctx.Err() == nil {
		err = o.expired(ctx, key, err, func() rows { return t.back(ctx) })
	}
	v, err := o.verdictOn(ctx, t, key, err)
	if err == nil {
		return o.conclude(ctx, t, key, v)
	}
	t.end(ctx)
	if errors.Is(err, errEnded) && o.unanswered(ctx, key) {
		err = errors.Join(ErrIndeterminate, err)
	}
	return Response{}, err
}

// claimWork begins the transaction of the work, waiting for other processes. Without one it returns what the key says.
func (o *Operation) claimWork(ctx context.Context, key Key, wait time.Duration) (*transaction, Response, error) {
	args := []any{key.Scope, key.Operation, key.Value, o.cfg.Seal != nil, o.window(), millis(o.cfg.LockTimeout)}
	args = slices.Clip(args) // what is appended is not shared
	until := time.Now().Add(wait)
	for range claimsMax {
		t, took, err := o.take(ctx, key, until, o.sql.work.claim, append(args, key.Fingerprint[:])...)
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
		t, took, err = o.take(ctx, key, until, o.sql.work.take, append(args, s.token, s.fingerprint[:])...)
		if took || err != nil {
			return t, Response{}, err
		}
		t.end(ctx)
	}
	return nil, Response{}, &InProgressError{RetryAfter: time.Second} // it changes hands all the time
}

// take begins a transaction with a statement that takes a key, and tells whether it did. Behind a savepoint begins what is the
// work's. Where another process has the key, it tries again at most until a time.
func (o *Operation) take(ctx context.Context, key Key, until time.Time, sql string, args ...any) (t *transaction, took bool, err error) {
	for wait := claimWait; ; wait = min(2*wait, askEvery) {
		var attempts int
		t, err = o.begin(ctx, func(batch *pgx.Batch) {
			o.limits(batch, min(claimWait, o.cfg.WaitMax))
			batch.Queue(sql, args...).QueryRow(func(row pgx.Row) error {
				err := row.Scan(&attempts, nil)
				if took = err == nil; errors.Is(err, pgx.ErrNoRows) {
					return nil
				}
				return err
			})
			batch.Queue(savepointSQL)
		})
		switch left := time.Until(until); {
		case err == nil:
			t.attempts = attempts
			return t, took, nil
		case !waited(err) && (code(err) != "57014" || ctx.Err() != nil): // which is where StatementTimeout is as short
			return nil, false, fmt.Errorf("claim %v: %w", key, err)
		case left <= 0:
			return nil, false, &InProgressError{RetryAfter: time.Second}
		case !pause(ctx, min(wait, left)):
			return nil, false, fmt.Errorf("claim %v: %w", key, ctx.Err())
		}
	}
}

// claimWait is how long a claim waits at the database, where it holds a connection.
const claimWait = 5 * time.Millisecond

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

// respond stores the response and commits. Where a failure of the work is to be stored, one of a deferred constraint shows
// before COMMIT, while the claim still stands.
func (o *Operation) respond(ctx context.Context, t *transaction, key Key, response Response) error {
	store, err := o.storing(key, response)
	if err != nil {
		return err
	}
	crashpoint.At(ctx, crashpoint.KeyCommitting)
	err = t.commit(ctx, func(batch *pgx.Batch) {
		if o.cfg.Strict || o.cfg.AttemptsMax > 0 {
			batch.Queue("SET CONSTRAINTS ALL IMMEDIATE")
		}
		store(batch)
	})
	if err != nil {
		return fmt.Errorf("commit %v: %w", key, err)
	}
	crashpoint.At(ctx, crashpoint.KeyCommitted)
	return nil
}

// storing is the statement that stores the response of a claim.
func (o *Operation) storing(key Key, response Response) (func(*pgx.Batch), error) {
	out, err := o.outcome(key, response, o.cfg.Seal != nil)
	return func(batch *pgx.Batch) {
		batch.Queue(o.sql.work.respond, key.Scope, key.Operation, key.Value, out.status, out.headers, out.body, out.dropped, o.window()).
			QueryRow(func(row pgx.Row) error {
				err := row.Scan(nil)
				if code(err) == "22012" { // it is another transaction than the one that claimed, and the server skips COMMIT
					return errEnded
				}
				return err
			})
	}, err
}
