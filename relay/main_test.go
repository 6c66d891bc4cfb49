package relay_test

import (
	"context"
	"fmt"
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

// either runs a test for both answers to a question, each under its name.
func either(t *testing.T, no, yes string, test func(t *testing.T, answer bool)) {
	t.Helper()
	for name, answer := range map[string]bool{no: false, yes: true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, answer)
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
