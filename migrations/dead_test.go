package migrations_test

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

const (
	deadRowSQL = `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, headers, created_at, reason, error, state)
		VALUES ('r', %d, effectonce.uuid_v7(), 't', %s, '{}', now(), '%s', '', '%s')`
	freedSQL = `SELECT coalesce(array_agg(encode(hash, 'hex') ORDER BY hash), '{}') FROM effectonce.outbox_dead_freed WHERE relay = 'r' AND topic = 't'`
	hashSQL  = `SELECT encode(sha256($1::text::bytea), 'hex')`
)

func deadRow(t *testing.T, conn *pgx.Conn, seq int, key, reason, state string) {
	t.Helper()
	pgtest.Exec(t, conn, fmt.Sprintf(deadRowSQL, seq, key, reason, state))
}

func ask[T any](t *testing.T, conn *pgx.Conn, sql string, args ...any) (v T) {
	t.Helper()
	require.NoError(t, conn.QueryRow(t.Context(), sql, args...).Scan(&v))
	return v
}

// Property: a deleted dead row, by whatever program, records its key as freed. A deletion that does
// not commit records none, and none waits for another because of it. A role that may delete dead
// rows needs no other right.
func TestDeletedDeadRowFreesItsKey(t *testing.T) {
	t.Parallel()
	ctx, address := t.Context(), pgtest.Database(t)
	conn, other := pgtest.Connect(t, address), pgtest.Connect(t, address)
	deadRow(t, conn, 1, "'k'", "refused", "held")
	deadRow(t, conn, 2, "'k'", "behind", "behind")
	deadRow(t, conn, 3, "NULL", "refused", "held")
	deadRow(t, conn, 4, "'l'", "refused", "held")
	tx, err := conn.Begin(ctx)
	require.NoError(t, err)
	_, err = tx.Exec(ctx, `DELETE FROM effectonce.outbox_dead WHERE seq = 1`)
	require.NoError(t, err)
	// Concurrent with the open transaction, in the same key.
	pgtest.Exec(t, other, `SET lock_timeout = '5s'`)
	pgtest.Exec(t, other, `DELETE FROM effectonce.outbox_dead WHERE seq = 2`)
	k, l := ask[string](t, other, hashSQL, "k"), ask[string](t, other, hashSQL, "l")
	require.Equal(t, []string{k}, ask[[]string](t, other, freedSQL))
	require.NoError(t, tx.Rollback(ctx))
	require.Equal(t, []string{k}, ask[[]string](t, other, freedSQL))

	prefix := pgtest.RolePrefix(t, address)
	bringRoles(t, other, migrations.Options{}, prefix)
	pgtest.Exec(t, other, fmt.Sprintf("REVOKE ALL ON effectonce.outbox_dead_freed FROM %s_operator", prefix)) // as before the roles are renewed
	operator := pgtest.Connect(t, pgtest.Login(t, address, prefix, "operator"))
	pgtest.Exec(t, operator, `DELETE FROM effectonce.outbox_dead WHERE seq IN (3, 4)`)
	require.ElementsMatch(t, []string{k, l}, ask[[]string](t, other, freedSQL), "a row without a key frees none")
}
