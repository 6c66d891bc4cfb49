package dedup_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

// Everything happens in the configured schema; there is no other one in this database.
func TestConfiguredSchemaIsUsed(t *testing.T) {
	t.Parallel()
	pool := newPool(t, pgtest.EmptyDatabase(t), 2)
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	require.NoError(t, migrations.Up(t.Context(), conn.Conn(), migrations.Options{Schema: "tenant_7"}))
	conn.Release()

	claims, err := dedup.New(dedup.Config{Schema: "tenant_7"})
	require.NoError(t, err)
	consumer, err := claims.Register(t.Context(), pool, dedup.Registration{Name: "billing/orders", Group: "billing", Topics: []string{"orders"}})
	require.NoError(t, err)
	id := newIDs(t, 1)[0]
	assert.Equal(t, []bool{true}, claimAlone(t, pool, claims, consumer, id))
	assert.Equal(t, []bool{false}, claimAlone(t, pool, claims, consumer, id))
	var rows int
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM tenant_7.processed_messages").Scan(&rows))
	assert.Equal(t, 1, rows)
}

// S1: an invalid schema name never reaches a statement.
func TestBadSchemaNamesAreRefused(t *testing.T) {
	t.Parallel()
	for _, name := range []string{`"we""ird; DROP TABLE x`, "a.b", "A", "ü", "a b", "1a", "pg_catalog", "a\x00", "a\n", "a'"} {
		claims, err := dedup.New(dedup.Config{Schema: name})
		require.ErrorContains(t, err, "schema ", name)
		assert.Nil(t, claims, name)
	}
}

// The claim is one statement and must stay one: a SELECT followed by an INSERT would be a race.
func TestClaimIsOneStatement(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	config := pool.Config().ConnConfig
	statements := &recorder{}
	config.Tracer = statements
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(t.Context())) }()
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	statements.list = nil
	_, err = newClaims(t).ClaimBatch(t.Context(), tx, dedup.Numbered(1), messages(newIDs(t, 1000)))
	require.NoError(t, err)
	require.Len(t, statements.list, 1)
	assert.Contains(t, statements.list[0], "-- dedup.claim\n")
	require.NoError(t, tx.Rollback(t.Context()))
}

// recorder keeps the text of every statement that a connection sends.
type recorder struct{ list []string }

func (r *recorder) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	r.list = append(r.list, data.SQL)
	return ctx
}

func (r *recorder) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (r *recorder) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}

func (r *recorder) TraceBatchQuery(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	r.list = append(r.list, data.SQL)
}

func (r *recorder) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}
