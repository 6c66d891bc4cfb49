package relay_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

func TestMain(m *testing.M) {
	pgtest.SideBySide()
	pgtest.Main(m)
}

// both runs a test at least once and exactly once.
func both(t *testing.T, test func(t *testing.T, exactly bool)) {
	t.Helper()
	either(t, "at least once", "exactly once", test)
}

// eachBoth runs a test for each case, at least once and exactly once.
func eachBoth[C any](t *testing.T, cases map[string]C, test func(t *testing.T, c C, exactly bool)) {
	t.Helper()
	each(t, cases, func(t *testing.T, c C) {
		t.Helper()
		both(t, func(t *testing.T, exactly bool) {
			t.Helper()
			test(t, c, exactly)
		})
	})
}

// either runs a test for both answers to a question, each under its name.
func either(t *testing.T, no, yes string, test func(t *testing.T, answer bool)) {
	t.Helper()
	each(t, map[string]bool{no: false, yes: true}, test)
}

// each runs a test for each case, under its name.
func each[C any](t *testing.T, cases map[string]C, test func(t *testing.T, c C)) {
	t.Helper()
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, c)
		})
	}
}

// database is a pool, a connection or a transaction.
type database interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

func must(t *testing.T, db database, sql string, args ...any) {
	t.Helper()
	_, err := db.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// all returns the only column of a query.
func all[T any](t *testing.T, db database, sql string, args ...any) []T {
	t.Helper()
	rows, err := db.Query(t.Context(), sql, args...)
	require.NoError(t, err)
	found, err := pgx.CollectRows(rows, pgx.RowTo[T])
	require.NoError(t, err)
	return found
}

// one returns the only column of the first row of a query.
func one[T any](t *testing.T, db database, sql string, args ...any) T {
	t.Helper()
	found := all[T](t, db, sql, args...)
	require.NotEmpty(t, found, sql)
	return found[0]
}

// becomes waits until a query is true.
func becomes(t *testing.T, db database, what, sql string) {
	t.Helper()
	testwait.True(t, what, func() bool { return one[bool](t, db, sql) })
}

// insertNumbered inserts rows 0, 1, … of as many keys as there are, in turn, and returns their payloads.
func insertNumbered(t *testing.T, pool *pgxpool.Pool, topic string, keys, rows int) []string {
	t.Helper()
	payloads := numbered("", rows)
	for i, payload := range payloads {
		insert(t, pool, topic, fmt.Sprint("k", i%keys), payload)
	}
	return payloads
}

// opened begins a transaction with a statement. It is rolled back when the test ends, if it is still open.
func opened(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) pgx.Tx {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	must(t, tx, sql, args...)
	return tx
}

// published is how many rows the relays' progress counts.
func published(t *testing.T, pool *pgxpool.Pool) int {
	t.Helper()
	return one[int](t, pool, `SELECT coalesce(sum(published), 0)::int FROM effectonce.outbox_progress_now`)
}

// drains starts a Drain, and returns what it will return.
func drains(t *testing.T, r *relay.Relay) <-chan error {
	t.Helper()
	ended := make(chan error, 1)
	go func() {
		_, err := r.Drain(t.Context())
		ended <- err
	}()
	return ended
}

// tracer is called right before each statement, also those of a batch, and when a batch was answered. It may
// change the context of a statement that comes alone.
type tracer struct {
	start    func(ctx context.Context, sql string) context.Context
	batchEnd func()
}

func (f *tracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, query pgx.TraceQueryStartData) context.Context {
	return f.start(ctx, query.SQL)
}

func (*tracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (f *tracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, query := range data.Batch.QueuedQueries {
		f.start(ctx, query.SQL)
	}
	return ctx
}

func (*tracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (f *tracer) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {
	if f.batchEnd != nil {
		f.batchEnd()
	}
}

// before runs something right before each statement with a tag.
func before(tag string, do func(ctx context.Context)) *tracer {
	return &tracer{start: func(ctx context.Context, sql string) context.Context {
		if strings.HasPrefix(sql, tag) {
			do(ctx)
		}
		return ctx
	}}
}

// breaking lets statements with a tag fail while on.
func breaking(tag string, on *atomic.Bool) *tracer {
	return &tracer{start: func(ctx context.Context, sql string) context.Context {
		if on.Load() && strings.HasPrefix(sql, tag) {
			var cancel context.CancelFunc
			ctx, cancel = context.WithCancel(ctx)
			cancel()
		}
		return ctx
	}}
}

// meddle changes the database behind the relay's back.
func meddle(t *testing.T, pool *pgxpool.Pool, sql string) func(context.Context) {
	t.Helper()
	return func(ctx context.Context) {
		if _, err := pool.Exec(ctx, sql); err != nil {
			t.Error(err)
		}
	}
}

// traced is a second pool on a pool's database.
func traced(t *testing.T, pool *pgxpool.Pool, tracer pgx.QueryTracer) *pgxpool.Pool {
	t.Helper()
	config := pool.Config()
	config.ConnConfig.Tracer = tracer
	config.ConnConfig.RuntimeParams["application_name"] = "traced"
	return pgtest.PoolOf(t, config)
}
