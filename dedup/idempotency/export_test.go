package idempotency

import "context"

// Another is the same operation as another program has it, with a flow of its own.
func (o *Operation) Another() *Operation { return &Operation{pool: o.pool, cfg: o.cfg, sql: o.sql} }

// ReapBy is Reap with another size of pages.
func (o *Operation) ReapBy(ctx context.Context, page int64) (int64, error) { return o.reap(ctx, page) }
