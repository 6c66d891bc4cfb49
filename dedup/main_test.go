package dedup_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func newClaims(tb testing.TB) *dedup.Claims {
	tb.Helper()
	claims, err := dedup.New(dedup.Config{})
	require.NoError(tb, err)
	return claims
}

// newIDs returns n fresh UUIDv7, in ascending order.
func newIDs(tb testing.TB, n int) []uuid.UUID {
	tb.Helper()
	ids := make([]uuid.UUID, n)
	for i := range ids {
		id, err := uuid.NewV7()
		require.NoError(tb, err)
		ids[i] = id
	}
	return ids
}

// begin opens a transaction that ends with the test, and returns it with the process that runs it.
func begin(t *testing.T, pool *pgxpool.Pool, opts pgx.TxOptions) (tx pgx.Tx, pid uint32) {
	t.Helper()
	tx, err := pool.BeginTx(t.Context(), opts)
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	return tx, tx.Conn().PgConn().PID()
}

func registered(t *testing.T, pool *pgxpool.Pool, claims *dedup.Claims, r dedup.Registration) dedup.Consumer {
	t.Helper()
	consumer, err := claims.Register(t.Context(), pool, r)
	require.NoError(t, err)
	return consumer
}

// claim claims a message in an open transaction.
func claim(t *testing.T, claims *dedup.Claims, tx pgx.Tx, consumer dedup.Consumer, id uuid.UUID) (fresh bool) {
	t.Helper()
	fresh, err := claims.Claim(t.Context(), tx, consumer, id, 0)
	require.NoError(t, err)
	return fresh
}

// claimAlone claims in its own transaction, which commits.
func claimAlone(t *testing.T, pool *pgxpool.Pool, claims *dedup.Claims, consumer dedup.Consumer, ids ...uuid.UUID) []bool {
	t.Helper()
	return claimIn(t, pool, pgx.TxOptions{}, claims, consumer, ids...)
}

func claimIn(t *testing.T, pool *pgxpool.Pool, opts pgx.TxOptions, claims *dedup.Claims, consumer dedup.Consumer, ids ...uuid.UUID) []bool {
	t.Helper()
	var result *dedup.Result
	err := pgx.BeginTxFunc(t.Context(), pool, opts, func(tx pgx.Tx) (err error) {
		result, err = claims.ClaimBatch(t.Context(), tx, consumer, messages(ids))
		return err
	})
	require.NoError(t, err)
	return result.Fresh()
}

// messages have these IDs, and one content.
func messages(ids []uuid.UUID) []dedup.Message {
	msgs := make([]dedup.Message, len(ids))
	for i, id := range ids {
		msgs[i].ID = id
	}
	return msgs
}

// waitUntil returns once the query is true.
func waitUntil(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	testwait.True(t, fmt.Sprint(sql, args), func() bool { return pgtest.Value[bool](t, pool, sql, args...) })
}

// waitUntilBlocked returns once exactly these processes block the first one.
func waitUntilBlocked(t *testing.T, pool *pgxpool.Pool, waiter uint32, holders ...uint32) {
	t.Helper()
	slices.Sort(holders)
	pids := make([]int32, len(holders))
	for i, pid := range holders {
		pids[i] = int32(pid)
	}
	waitUntil(t, pool, `SELECT pg_blocking_pids($1) = $2::int[]`, int32(waiter), pids)
}

// answer is the result of a claim that was made in a goroutine.
type answer struct {
	fresh bool
	err   error
}

// claimInBackground claims for consumer 1 while the test continues: the claim may have to wait.
func claimInBackground(t *testing.T, claims *dedup.Claims, tx pgx.Tx, id uuid.UUID) <-chan answer {
	t.Helper()
	answers := make(chan answer, 1)
	go func() {
		fresh, err := claims.Claim(t.Context(), tx, dedup.Numbered(1), id, 0)
		answers <- answer{fresh, err}
	}()
	return answers
}

// contested has one transaction hold a message of consumer 1, and another one wait for it.
func contested(t *testing.T, pool *pgxpool.Pool, claims *dedup.Claims, opts pgx.TxOptions, id uuid.UUID) (holder, waiter pgx.Tx, answers <-chan answer) {
	t.Helper()
	holder, holderPID := begin(t, pool, opts)
	claim(t, claims, holder, dedup.Numbered(1), id)
	waiter, pid := begin(t, pool, opts)
	answers = claimInBackground(t, claims, waiter, id)
	waitUntilBlocked(t, pool, pid, holderPID)
	return holder, waiter, answers
}
