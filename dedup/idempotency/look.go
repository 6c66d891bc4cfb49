package idempotency

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// ErrNotStored is returned by Look if nothing is stored under a key: it was never claimed, its work
// failed and freed it or has not committed yet, or its window is over.
var ErrNotStored = errors.New("nothing is stored under the idempotency key")

// Look returns the stored outcome of a key, with Replayed set, and changes nothing. A zero
// fingerprint is not compared. Look is one statement without a transaction; Hooks do not count it.
//
// Without an outcome the error wraps ErrNotStored; ErrInProgress (an InProgressError) if the key is
// unfinished, whether or not a worker holds it now; ErrMismatch, ErrIndeterminate, ErrAbandoned or
// ErrUnreadable; or ErrInvalid for a key that is out of bounds or of another operation. Any other
// error means that the query failed; retrying is safe.
func (o *Operation) Look(ctx context.Context, key Key) (Response, error) {
	key, err := o.complete(key)
	if err != nil {
		return Response{}, err
	}
	s, err := read(o.pool.QueryRow(ctx, o.sql.look, key.Scope, key.Operation, key.Value))
	switch {
	case err != nil:
		return Response{}, fmt.Errorf("look at %v: %w", key, err)
	case s == nil:
		return Response{}, fmt.Errorf("%w: %v", ErrNotStored, key)
	}
	if key.Fingerprint == (Fingerprint{}) {
		key.Fingerprint = s.fingerprint
	}
	response, ok, err := o.answer(key, s)
	if !ok {
		err = &InProgressError{RetryAfter: max(s.putOff, time.Second).Round(time.Second)}
	}
	return response, err
}

// Config returns the settings of the operation, with defaults in place of zeros.
func (o *Operation) Config() Config { return o.cfg }

// Operation returns the operation whose keys the flow executes.
func (f *Flow[S]) Operation() *Operation { return f.op }

// Config returns the settings of the flow, with defaults in place of zeros.
func (f *Flow[S]) Config() FlowConfig[S] { return f.cfg }
