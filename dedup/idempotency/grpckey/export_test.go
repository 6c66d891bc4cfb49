package grpckey

import (
	"context"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Answer is the status for an error of the engine, among them those that need many clients at once.
func (i *Interceptor) Answer(ctx context.Context, err error) error {
	return i.fail(ctx, idempotency.Key{}, err)
}
