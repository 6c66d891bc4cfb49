package idempotency_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// left is what the documented query says of one key of encryption.
type left struct {
	Keys, Unfinished, Forever int
	Ends                      bool // there is a time by which they are forgotten
}

// documentedRest runs the query of docs/how-to/secure.md.
func documentedRest(t *testing.T, pool *pgxpool.Pool) map[string]left {
	t.Helper()
	text, err := os.ReadFile("../../docs/how-to/secure.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(text), "\n## Rotating the keys that encrypt requests\n")
	require.True(t, found)
	_, sql, found := strings.Cut(section, "```sql\n")
	require.True(t, found)
	sql, _, _ = strings.Cut(sql, ";\n```")
	rows, err := pool.Query(t.Context(), "SELECT name, keys, unfinished, for_ever, forgotten_by IS NOT NULL FROM ("+sql+") q")
	require.NoError(t, err)
	rest := map[string]left{}
	var name string
	var l left
	_, err = pgx.ForEachRow(rows, []any{&name, &l.Keys, &l.Unfinished, &l.Forever, &l.Ends}, func() error {
		rest[name] = l
		return nil
	})
	require.NoError(t, err)
	return rest
}

// Property: in the documented three deployments each replica, of the earlier or later version,
// reads what the other stored, so that each request is executed once and replayed everywhere; in a
// single deployment an old replica refuses what a new one stored, and executes nothing. The query
// lists the keys still in use: the old key can be dropped when it is no longer listed, and not
// before. Row S13 of guarantees.md.
func TestDocumentedRotation(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	ask := func(s *idempotency.AESSealer, value string) (idempotency.Response, error) {
		op := newOperation(t, pool, idempotency.Config{Seal: s})
		return op.Once(t.Context(), key(value), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			return idempotency.Response{Status: 201, Body: []byte(canary + value)}, effect(ctx, tx, value)
		})
	}
	before, both := newSealer(t, "old", "old"), newSealer(t, "old", "old", "new")
	current, after := newSealer(t, "new", "old", "new"), newSealer(t, "new", "new")
	for name, pair := range map[string][2]*idempotency.AESSealer{"1": {before, both}, "2": {both, current}} { // the third one is below
		for i, first := range pair {
			value := name + string(rune('a'+i))
			_, err := ask(first, value)
			require.NoError(t, err)
			for _, s := range pair {
				response, err := ask(s, value)
				require.NoError(t, err, "deployment %s", name)
				require.True(t, response.Replayed)
				require.Equal(t, canary+value, string(response.Body))
			}
			require.Equal(t, 1, effects(t, pool, value))
		}
	}
	_, err := ask(after, "at once")
	require.NoError(t, err)
	_, err = ask(before, "at once")
	require.ErrorIs(t, err, idempotency.ErrUnknownSealKey)
	require.Equal(t, 1, effects(t, pool, "at once"))

	ledger, err := idempotency.New(pool, idempotency.Config{Operation: "ledger", Forever: true, Seal: both})
	require.NoError(t, err)
	_, err = ledger.Once(t.Context(), key("for ever"), insertOnce("for ever"))
	require.NoError(t, err)
	_, err = newOperation(t, pool, idempotency.Config{Seal: both}).Once(t.Context(), key("no body"), func(context.Context, pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{Status: 303, Header: map[string][]string{"Location": {canary}}}, nil
	})
	require.NoError(t, err)
	flow, err := idempotency.NewFlow(newOperation(t, pool, idempotency.Config{Seal: both}), idempotency.FlowConfig[payment]{StoreRequest: true}, idempotency.Phase[payment]{
		Name: "all", Write: func(context.Context, pgx.Tx, *idempotency.Step[payment]) error { return errors.New("away") },
	})
	require.NoError(t, err)
	_, err = flow.Do(t.Context(), key("unfinished"), []byte(canary))
	require.ErrorContains(t, err, "away")
	require.Equal(t, map[string]left{"old": {Keys: 6, Unfinished: 1, Forever: 1, Ends: true}, "new": {Keys: 2, Ends: true}}, documentedRest(t, pool))

	passWindows := `UPDATE effectonce.idempotency_keys SET expires_at = expires_at - interval '25 hours'`
	_, err = pool.Exec(t.Context(), passWindows+`; DELETE FROM effectonce.idempotency_keys WHERE key IN ('for ever', 'unfinished')`)
	require.NoError(t, err)
	_, err = ask(after, "young")
	require.NoError(t, err)
	_, err = newOperation(t, pool, idempotency.Config{}).Reap(t.Context())
	require.NoError(t, err)
	require.Equal(t, map[string]left{"new": {Keys: 1, Ends: true}}, documentedRest(t, pool))
	response, err := ask(after, "young")
	require.NoError(t, err)
	require.True(t, response.Replayed)
}
