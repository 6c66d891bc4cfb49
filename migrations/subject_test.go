package migrations_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

// Property: entries of the operator's log that are larger than today's bound do not keep a schema
// from being upgraded, and stay as they are; new ones of that size are refused.
func TestLargeEntriesOfTheLogAreUpgraded(t *testing.T) {
	t.Parallel()
	ctx, conn := t.Context(), pgtest.Connect(t, pgtest.EmptyDatabase(t))
	const large = `INSERT INTO effectonce.operator_actions (who, what, why, subject)
		SELECT 'alice', 'parked.retry', 'why', jsonb_build_object('ids', (SELECT jsonb_agg(gen_random_uuid()) FROM generate_series(1, 60000)))`
	require.NoError(t, migrations.To(ctx, conn, migrations.Options{}, 7))
	pgtest.Exec(t, conn, large)
	require.NoError(t, migrations.Up(ctx, conn, migrations.Options{}))
	require.Equal(t, "alice", ask[string](t, conn, `SELECT stated FROM effectonce.operator_actions WHERE jsonb_array_length(subject->'ids') = 60000`))
	_, err := conn.Exec(ctx, large)
	require.ErrorContains(t, err, "operator_actions_subject_is_too_large")
}
