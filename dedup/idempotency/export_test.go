package idempotency

import "context"

// ReapBy is Reap with another size of pages.
func (o *Operation) ReapBy(ctx context.Context, page int64) (int64, error) { return o.reap(ctx, page) }

// Merge is merge, for its fuzzing.
var Merge = merge
