package idempotency

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/pgerr"
)

// Once executes work under a key, in one transaction with the key: both are committed, or neither
// is. Another request with the same key waits for it at most WaitMax, and then gets the same
// response with Replayed set, or ErrInProgress.
//
// work may run more than once (after a serialization failure, a deadlock or a failed attempt). Its
// effects are those of one execution, as long as all of them use tx, which work must not commit or
// roll back. Publish outbox messages under key.ChildID, so that they keep their IDs. Calls to other
// systems belong in a Flow.
//
// An error of the work rolls everything back and frees the key at once. Final stores a response
// without effects in the same transaction, so no waiting request executes the work again. The one
// exception is work that lost its connection, which pgx closes where ctx ends during a statement:
// the claim is lost with the connection, and Final stores nothing.
//
// Errors that wrap ErrMismatch, ErrInProgress, ErrAbandoned and ErrInvalid mean that the work did
// not run. After ErrUnanswered the outcome is unknown: retry with the same key. Retrying is safe
// after every error.
func (o *Operation) Once(ctx context.Context, key Key, work func(ctx context.Context, tx pgx.Tx) (Response, error)) (Response, error) {
	key, err := o.complete(key)
	if err != nil {
		return o.answered(Response{}, err)
	}
	return o.answered(o.inTurn(ctx, key, func() (response Response, err error) {
		err = repeat(ctx, func() error {
			response, err = o.once(ctx, key, work)
			return err
		})
		return response, err
	}))
}

// retriesMax bounds how often a transaction is retried at once after a serialization failure or a deadlock,
// and a claim after the key changed.
const retriesMax = 10

// repeat calls f again after a serialization failure or a deadlock.
func repeat(ctx context.Context, f func() error) error {
	for attempt := 1; ; attempt++ {
		err := f()
		if err == nil || attempt > retriesMax || !conflict(err) {
			return err
		}
		if !pause.For(ctx, rand.N(time.Duration(attempt)*10*time.Millisecond)) { //nolint:gosec // jitter needs no secret
			return errors.Join(ctx.Err(), err)
		}
	}
}

// once executes the transaction one time.
func (o *Operation) once(ctx context.Context, key Key, work func(ctx context.Context, tx pgx.Tx) (Response, error)) (Response, error) {
	t, replayed, err := o.claimWork(ctx, key)
	if t == nil {
		return replayed, err
	}
	defer t.end(ctx)
	crashpoint.At(ctx, crashpoint.KeyClaimed)
	var response Response
	err = t.runWork(ctx, func(ctx context.Context, tx pgx.Tx) (err error) {
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
		if pgerr.State(err) == "" { // the outcome is unknown, or the error is not the work's
			return Response{}, err
		}
	}
	if ctx.Err() == nil {
		err = o.expired(ctx, key, err)
	}
	v, err := o.verdictOn(ctx, t, key, err)
	if err == nil {
		return o.conclude(ctx, t, key, v)
	}
	return Response{}, err
}

// claimWork begins the transaction of the work. If it cannot claim the key, it returns what is stored
// under it.
func (o *Operation) claimWork(ctx context.Context, key Key) (*transaction, Response, error) {
	fingerprint, err := o.fingerprint(key)
	if err != nil {
		return nil, Response{}, err
	}
	for range retriesMax {
		t, took, err := o.beginClaimed(ctx, key, fingerprint)
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
		response, ok, err := o.answer(key, s)
		if !ok {
			err = fmt.Errorf("%w: the key was begun as a flow, in phases", ErrUnknownRecoveryPoint)
		}
		return nil, response, err
	}
	return nil, Response{}, &InProgressError{RetryAfter: time.Second} // the key keeps changing
}

// beginClaimed begins a transaction whose first statement claims the key, and a savepoint behind it. took:
// this transaction holds the key.
func (o *Operation) beginClaimed(ctx context.Context, key Key, fingerprint []byte) (t *transaction, took bool, err error) {
	t, err = o.begin(ctx, min(claimWait, o.cfg.WaitMax), true, func(batch *pgx.Batch) {
		batch.Queue(o.sql[claimWorkSQL], key.Scope, key.Operation, key.Value, o.cfg.Seal != nil, o.window(), millis(o.cfg.LockTimeout), fingerprint).QueryRow(one(&took, nil))
		batch.Queue(savepointSQL)
	})
	return t, took, claimed(ctx, key, err)
}

// one scans a row into targets, and notes whether there is one.
func one(found *bool, targets ...any) func(pgx.Row) error {
	return func(row pgx.Row) error {
		err := row.Scan(targets...)
		if *found = err == nil; errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		return err
	}
}

// claimed returns the error of a claim: ErrInProgress if another session has locked the key, or the table.
func claimed(ctx context.Context, key Key, err error) error {
	switch {
	case err == nil:
		return nil
	case pgerr.Is(err, pgerr.LockNotAvailable), pgerr.Is(err, pgerr.QueryCanceled) && ctx.Err() == nil: // StatementTimeout is as short as claimWait
		return &InProgressError{RetryAfter: time.Second}
	}
	return fmt.Errorf("claim %v: %w", key, err)
}

// instead ends a transaction that claimed nothing, and reads the key, in one round trip.
func (t *transaction) instead(ctx context.Context, key Key) (s *stored, err error) {
	defer t.end(ctx)
	batch := &pgx.Batch{}
	batch.Queue("ROLLBACK")
	batch.Queue(t.o.sql[lookSQL], key.Scope, key.Operation, key.Value).QueryRow(func(row pgx.Row) (err error) { s, err = read(row); return err })
	if err := t.conn.SendBatch(ctx, batch).Close(); err != nil {
		return nil, fmt.Errorf("look at %v: %w", key, err)
	}
	return s, nil
}

// respond stores the response and commits. If a failure of the work is stored (Strict), deferred
// constraints are checked before COMMIT, while the claim still exists.
func (o *Operation) respond(ctx context.Context, t *transaction, key Key, response Response) error {
	store, err := o.storing(key, response)
	if err != nil {
		return err
	}
	crashpoint.At(ctx, crashpoint.KeyCommitting)
	err = t.commit(ctx, func(batch *pgx.Batch) {
		if o.cfg.Strict {
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

// storing returns the statement that stores the response of a claim.
func (o *Operation) storing(key Key, response Response) (func(*pgx.Batch), error) {
	out, err := o.outcome(key, response, o.cfg.Seal != nil)
	return func(batch *pgx.Batch) {
		batch.Queue(o.sql[respondSQL], key.Scope, key.Operation, key.Value, out.status, out.headers, out.body, out.dropped, o.window()).
			QueryRow(func(row pgx.Row) error {
				err := row.Scan(nil)
				if pgerr.Is(err, pgerr.DivisionByZero) { // not the transaction that claimed the key; the server skips COMMIT
					return errEnded
				}
				return err
			})
	}, err
}
