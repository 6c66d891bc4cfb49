package idempotency

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"
)

// verdict is what is stored for a key in place of the effects of its work.
type verdict struct {
	store    func(*pgx.Batch)
	response Response
	doubt    error // the work must not run again; returned to the caller
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
		s, err := o.doubting(key, cause)
		return verdict{doubt: cause, store: func(batch *pgx.Batch) { batch.Queue(s.sql, s.args...) }}, err
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

// doubting marks a key of work in one transaction for a person: in the transaction that holds it, or in another
// one, unless another request has executed it.
func (o *Operation) doubting(key Key, cause error) (statement, error) {
	fingerprint, err := o.fingerprint(key)
	return statement{o.sql[doubtSQL], []any{key.Scope, key.Operation, key.Value, fingerprint, o.cfg.Seal != nil, text(cause)}}, err
}

// conclude ends the transaction of a claim with a verdict on its work. If the claim is lost with its
// transaction, an outcome is not stored, and the next request executes the work; doubt is still marked.
func (o *Operation) conclude(ctx context.Context, t *transaction, key Key, v verdict) (Response, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), o.cfg.StatementTimeout)
	defer cancel()
	err := t.replace(ctx, v.store)
	t.end(ctx)
	if v.doubt == nil {
		if err != nil {
			err = fmt.Errorf("store the outcome of %v: %w", key, err)
		}
		return v.response, err
	}
	rows := int64(1)
	if err != nil {
		var marking statement
		if marking, err = o.doubting(key, v.doubt); err == nil {
			rows, err = o.durably(ctx, marking)
		}
	}
	switch {
	case err != nil: // what it says about the key is hidden
		err = ofWork(fmt.Errorf("mark %v as %s: %w", key, indeterminate, err))
	case rows == 0:
		o.cfg.Logger.ErrorContext(ctx, "indeterminate work lost its connection, and another request executed it: check whether the other system acted twice", "key", key, "error", v.doubt)
	default:
		o.cfg.Logger.ErrorContext(ctx, "a key needs a person: see outbox-relay keys", "key", key, "state", indeterminate, "error", v.doubt)
	}
	return Response{}, errors.Join(v.doubt, err)
}

// replace undoes what the work wrote, stores something in its place, and commits. The claim is held
// throughout.
func (t *transaction) replace(ctx context.Context, store func(*pgx.Batch)) error {
	switch {
	case t.pooled == nil, t.conn.IsClosed():
		return fmt.Errorf("the connection of the work is lost: %w", io.ErrUnexpectedEOF)
	case t.stray, t.conn.PgConn().IsBusy():
		return errShared
	case t.ended():
		return errEnded
	}
	failed := t.failed()
	if failed { // alone: pgx prepares the statements of a batch first, which a failed transaction refuses
		if _, err := t.conn.Exec(ctx, undoSQL); err != nil {
			return err
		}
	}
	return t.commit(ctx, func(batch *pgx.Batch) {
		if !failed {
			batch.Queue(undoSQL)
		}
		store(batch)
	})
}
