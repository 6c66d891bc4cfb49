package idempotency_test

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Property: the documented comparison with a provider's list finds what is only here, only there,
// or not known here, and nothing else, whatever is in a key's name. Row H5 of guarantees.md.
func TestDocumentedComparison(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/how-to/http-keys.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(text), "\n## Comparing requests with a provider's list\n")
	require.True(t, found)
	_, sql, found := strings.Cut(section, "```sql\n")
	require.True(t, found)
	sql, _, _ = strings.Cut(sql, ";\n```")

	pool := newPool(t)
	_, err = pool.Exec(t.Context(), `CREATE TABLE provider (reference uuid)`)
	require.NoError(t, err)
	acts := func(id uuid.UUID) {
		_, err := pool.Exec(t.Context(), `INSERT INTO provider VALUES ($1)`, id)
		require.NoError(t, err)
	}
	op, err := idempotency.New(pool, idempotency.Config{Operation: "create-order"})
	require.NoError(t, err)
	flow, err := idempotency.NewFlow(op, idempotency.FlowConfig[payment]{}, idempotency.Phase[payment]{
		Name: "charge",
		Call: func(_ context.Context, s *step) error {
			if s.Key.Value != "did not act" {
				acts(s.ChildID())
			}
			if s.Key.Value == "acted, not done here" {
				return idempotency.Indeterminate(errAway)
			}
			return nil
		},
	}, ends("ship"))
	require.NoError(t, err)
	for _, value := range []string{"agrees", "Ümläut 'x'", "did not act", "acted, not done here"} {
		_, err := flow.Do(t.Context(), key(value), nil)
		require.Equal(t, value == "acted, not done here", err != nil)
	}
	acts(uuid.New())
	rows, err := pool.Query(t.Context(), `SELECT provider, coalesce(key, provider), coalesce(state, 'none') FROM (`+sql+`) q ORDER BY 1`)
	require.NoError(t, err)
	got, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (s [3]string, err error) { return s, row.Scan(&s[0], &s[1], &s[2]) })
	require.NoError(t, err)
	require.Equal(t, [][3]string{
		{"acted for no key", "acted for no key", "none"}, {"acted, not done here", "acted, not done here", "indeterminate"}, {"did not act", "did not act", "finished"},
	}, got)
}
