package pgtest

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Statements is a tracer for a connection's configuration: it is called with each statement before
// it is sent, also with those of a batch.
type Statements func(sql string)

// TraceQueryStart implements pgx.QueryTracer.
func (s Statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	s(data.SQL)
	return ctx
}

// TraceQueryEnd implements pgx.QueryTracer.
func (Statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TraceBatchStart implements pgx.BatchTracer.
func (Statements) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}

// TraceBatchQuery implements pgx.BatchTracer.
func (s Statements) TraceBatchQuery(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	s(data.SQL)
}

// TraceBatchEnd implements pgx.BatchTracer.
func (Statements) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}
