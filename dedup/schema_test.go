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

// S8: a schema that another role puts first in the search path, with tables and functions of the
// same names and with functions that fit our arguments better than PostgreSQL's own, has no effect.
func TestSearchPathCannotHijackClaims(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	_, err := newPool(t, address, 1).Exec(t.Context(), `
CREATE SCHEMA evil;
CREATE TABLE evil.processed_messages (LIKE effectonce.processed_messages);
CREATE TABLE evil.consumers (LIKE effectonce.consumers);
CREATE FUNCTION evil.message_id(text, text) RETURNS uuid LANGUAGE sql AS $$ SELECT gen_random_uuid() $$;
CREATE FUNCTION evil.unnest(uuid[]) RETURNS SETOF uuid LANGUAGE sql AS $$ SELECT gen_random_uuid() WHERE false $$;
CREATE FUNCTION evil.now() RETURNS timestamptz LANGUAGE sql AS $$ SELECT 'epoch'::timestamptz $$;
CREATE FUNCTION evil.convert_to(text, text) RETURNS bytea LANGUAGE sql AS $$ SELECT ''::bytea $$;
CREATE FUNCTION evil.sha256(bytea) RETURNS bytea LANGUAGE sql AS $$ SELECT '\x00'::bytea $$;
CREATE FUNCTION evil.bit_or_varbit(varbit, bit) RETURNS varbit LANGUAGE sql AS $$ SELECT B''::varbit $$;
CREATE OPERATOR evil.|| (FUNCTION = evil.bit_or_varbit, LEFTARG = varbit, RIGHTARG = bit);`)
	require.NoError(t, err)
	pool, claims := newPool(t, address, 2, "search_path", "evil, public"), newClaims(t)

	consumer, err := claims.Register(t.Context(), pool, dedup.Registration{Name: "billing/orders", Group: "billing", Topics: []string{"orders"}})
	require.NoError(t, err)
	id := newIDs(t, 1)[0]
	assert.Equal(t, []bool{true}, claimAlone(t, pool, claims, consumer, id))
	assert.Equal(t, []bool{false}, claimAlone(t, pool, claims, consumer, id))

	for _, text := range []string{"order-4711", "01ARZ3NDEKTSV4RRFFQ69G5FAV"} {
		var computed [16]byte
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT effectonce.message_id('orders', $1)", text).Scan(&computed))
		assert.Equal(t, [16]byte(dedup.MessageID("orders", []byte(text))), computed, text)
	}

	var rows, hijacked int
	var recent bool
	err = pool.QueryRow(t.Context(), `SELECT count(*), (SELECT count(*) FROM evil.processed_messages) + (SELECT count(*) FROM evil.consumers),
		bool_and(processed_at > pg_catalog.now() - interval '1 hour') FROM effectonce.processed_messages`).Scan(&rows, &hijacked, &recent)
	require.NoError(t, err)
	assert.Equal(t, 1, rows)
	assert.Zero(t, hijacked)
	assert.True(t, recent)
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
	_, err = newClaims(t).ClaimBatch(t.Context(), tx, dedup.Numbered(1), newIDs(t, 1000))
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
