package idempotency

import (
	"context"
	"errors"
)

type calledOnceKey struct{}

// calledOnce marks the context of a call that must not be made twice.
func calledOnce(ctx context.Context) context.Context {
	return context.WithValue(ctx, calledOnceKey{}, true)
}

// CalledOnce tells whether ctx is the one of the Call of a phase that is AtMostOnce: a client that is given it sends its
// request once, and follows no redirect that would send it again. See keyclient.Single.
func CalledOnce(ctx context.Context) bool {
	marked, _ := ctx.Value(calledOnceKey{}).(bool)
	return marked
}

// certainlyNotDone tells whether the error of a call proves that the foreign system did nothing.
func certainlyNotDone(_ context.Context, err error) bool {
	var not *notDoneError
	return errors.As(err, &not)
}
