package idempotency

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/pgerr"
)

// verdict is what is stored for a key in place of the effects of its work.
type verdict struct {
	store    func(*pgx.Batch)
	response Response
	err      error // returned to the caller, also if it is stored
	doubt    bool  // the work must not run again
}

// verdictOn returns what a failure of the work stores, if anything. A failure that a retry could
// fix stores nothing without Strict. A failure that does not depend on the request stores nothing either.
func (o *Operation) verdictOn(ctx context.Context, t *transaction, key Key, cause error) (verdict, error) {
	var final *FinalError
	var unknown *indeterminateError
	var response Response
	switch {
	case errors.As(cause, &final):
		response = final.Response
	case errors.As(cause, &unknown):
		return verdict{err: cause, doubt: true, store: func(batch *pgx.Batch) {
			batch.Queue(o.sql.doubt, key.Scope, key.Operation, key.Value, text(cause))
		}}, nil
	case !o.cfg.Strict, conflict(cause), outage(cause), t.away, errors.Is(cause, errEnded), ctx.Err() != nil:
		return verdict{}, cause
	default:
		response = o.failed(ctx, key, cause)
	}
	store, err := o.storing(key, response)
	return verdict{store: store, response: response}, err
}

// failed makes the outcome of a failure that a retry could fix. Nothing else tells its cause.
func (o *Operation) failed(ctx context.Context, key Key, cause error) Response {
	o.cfg.Logger.ErrorContext(ctx, "a failure became the outcome of a key", "key", key, "error", cause)
	return o.cfg.Failed(cause)
}

// conclude ends the transaction of a claim with a verdict on its work. If the claim was lost with
// its transaction, the key is claimed again; if another request finished it in between, that
// outcome counts.
func (o *Operation) conclude(ctx context.Context, t *transaction, key Key, v verdict) (Response, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), o.cfg.StatementTimeout)
	defer cancel()
	for {
		err := t.replace(ctx, v.store)
		t.end(ctx)
		if err == nil {
			if v.doubt {
				o.cfg.Logger.ErrorContext(ctx, "a key needs a person: see outbox-relay keys", "key", key, "state", indeterminate, "error", v.err)
			}
			return v.response, v.err
		}
		if !errors.Is(err, errGone) && !errors.Is(err, ErrUnanswered) && (!v.doubt || !conflict(err)) {
			return Response{}, o.notStored(key, v, err)
		}
		var replayed Response
		for {
			t, replayed, err = o.claimWork(ctx, key)
			if !errors.Is(err, ErrInProgress) && (!v.doubt || !conflict(err)) || !pause.For(ctx, askEvery) {
				break
			}
		}
		switch {
		case t != nil:
		case err != nil:
			return Response{}, o.notStored(key, v, err)
		case v.doubt:
			o.cfg.Logger.ErrorContext(ctx, "indeterminate work lost its connection, and another request executed it: check whether the other system acted twice", "key", key, "error", v.err)
			return Response{}, v.err
		default:
			return replayed, nil
		}
	}
}

// notStored returns the error for a verdict that could not be stored. It hides what err says about
// the key.
func (o *Operation) notStored(key Key, v verdict, err error) error {
	if v.err == nil {
		return err
	}
	return errors.Join(v.err, ofWork(fmt.Errorf("store the result of %v: %w", key, err)))
}

// errGone: the claim of a transaction is lost, or the transaction cannot be used: the connection
// broke, or the work ended the transaction or left a statement open.
var errGone = errors.New("the transaction of the work is over")

// replace undoes what the work wrote, stores something in its place, and commits. The claim is held
// throughout.
func (t *transaction) replace(ctx context.Context, store func(*pgx.Batch)) error {
	if t.pooled == nil || t.stray || t.conn.IsClosed() || t.conn.PgConn().IsBusy() || t.ended() { // no statement can be executed
		return errGone
	}
	failed := t.failed()
	if failed { // alone: pgx prepares the statements of a batch first, which a failed transaction refuses
		if _, err := t.conn.Exec(ctx, undoSQL); err != nil {
			return t.gone(err)
		}
	}
	return t.gone(t.commit(ctx, func(batch *pgx.Batch) {
		if !failed {
			batch.Queue(undoSQL)
		}
		store(batch)
	}))
}

// gone marks errors that mean that the claim's transaction is lost.
func (t *transaction) gone(err error) error {
	if pgerr.Is(err, pgerr.UnknownSavepoint) || err != nil && t.pooled != nil && t.conn.IsClosed() {
		return fmt.Errorf("%w: %w", errGone, ofWork(err))
	}
	return err
}
