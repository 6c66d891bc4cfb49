package keys_test

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/keys"
	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// documented returns the SQL blocks of docs/reference/idempotency-keys.md about keys, split into
// statements, with psql's variables filled in.
func documented(t *testing.T, variables ...string) [][]string {
	t.Helper()
	text, err := os.ReadFile("../../../../docs/reference/idempotency-keys.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(text), "\n## idempotency_keys\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")
	var blocks [][]string
	for _, block := range regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(section, -1) {
		sql := strings.NewReplacer(variables...).Replace(block[1])
		blocks = append(blocks, strings.SplitAfter(strings.TrimSpace(sql), ";\n"))
	}
	require.Len(t, blocks, 3)
	return blocks
}

// request are psql's variables for one request.
func request(what, token string) []string {
	return []string{":'scope'", "'t'", ":'operation'", "'charge'", ":'key'", "'k'", ":'request'", "'" + what + "'", ":token", token}
}

// answer is what the documented look says.
func answer(t *testing.T, pool *pgxpool.Pool, what string) string {
	t.Helper()
	rows, err := pool.Query(t.Context(), documented(t, request(what, "0")...)[0][3])
	require.NoError(t, err)
	found, err := pgx.CollectExactlyOneRow(rows, pgx.RowToMap)
	require.NoError(t, err)
	return found["answer"].(string)
}

// A program in another language that does what the documentation says agrees with this one: its
// outcome is replayed here, and its claim gives the documented answers in their order.
func TestDocumentedClaim(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	steps := documented(t, request("1 EUR", "0")...)[0]
	require.Len(t, steps, 7)
	claim := steps[2]
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	for i, step := range steps {
		tag, err := conn.Exec(t.Context(), step)
		require.NoError(t, err, step)
		if i == 2 || i == 5 {
			assert.Equal(t, int64(1), tag.RowsAffected())
		}
	}
	conn.Release()
	op, err := idempotency.New(pool, idempotency.Config{Operation: "charge"})
	require.NoError(t, err)
	k := named("k")
	_, err = op.Once(t.Context(), k, nil)
	require.ErrorIs(t, err, idempotency.ErrMismatch)
	exec(t, pool, "UPDATE effectonce.idempotency_keys SET fingerprint = decode(repeat('00', 32), 'hex')")
	response, err := op.Once(t.Context(), k, nil)
	require.NoError(t, err)
	assert.Equal(t, idempotency.Response{Status: 201, Header: map[string][]string{"Location": {"/orders/7"}}, Body: []byte("done"), Replayed: true}, response)
	exec(t, pool, "UPDATE effectonce.idempotency_keys SET fingerprint = sha256('1 EUR')")

	tag, err := pool.Exec(t.Context(), claim)
	require.NoError(t, err)
	assert.Zero(t, tag.RowsAffected())
	assert.Equal(t, "mismatch", answer(t, pool, "2 EUR"), "before the replay")
	assert.Equal(t, "replay", answer(t, pool, "1 EUR"))
	for state, want := range map[string]string{"indeterminate": "indeterminate", "unanswered": "indeterminate", "abandoned": "abandoned", "locked": "in progress", "free": "execute"} {
		exec(t, pool, "DELETE FROM effectonce.idempotency_keys")
		key(t, pool, "k", state)
		assert.Equal(t, want, answer(t, pool, "x"), state)
		assert.Equal(t, "mismatch", answer(t, pool, "y"), state)
	}
}

// Phases by plain SQL: a worker that lost its token stores nothing more, and the others continue
// from the recovery point.
func TestDocumentedPhases(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	token := scalar[int64](t, pool, documented(t, request("x", "0")...)[2][0])
	steps := func(taken int64) []string { return documented(t, request("x", fmt.Sprint(token+taken))...)[2] }
	first, second := steps(0), steps(1)
	require.Len(t, first, 4)
	exec(t, pool, first[2])
	tag, err := pool.Exec(t.Context(), first[1])
	require.NoError(t, err)
	assert.Zero(t, tag.RowsAffected(), "its lock is live")
	_, err = unlock(t.Context(), pool, keys.Place{Scope: "t", Operation: "charge", Key: "k"})
	require.NoError(t, err)
	var refused *pgconn.PgError
	_, err = pool.Exec(t.Context(), first[3])
	require.ErrorAs(t, err, &refused)
	assert.Equal(t, "EO003", refused.Code)
	tag, err = pool.Exec(t.Context(), second[1])
	require.NoError(t, err)
	assert.Equal(t, int64(1), tag.RowsAffected())
	exec(t, pool, steps(2)[3])
	row := find(t, pool, "k")
	assert.Equal(t, keys.Finished, row.State)
	assert.Equal(t, []string{"reserve", "pay"}, row.Phases)
}
