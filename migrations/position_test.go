package migrations_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: check_position lets only the holder of the position's epoch pass, and with p_known only
// while the database has what the caller saw stored. Until its transaction ends, no other holder
// can take the position.
func TestCheckPositionFencesFormerHolders(t *testing.T) {
	t.Parallel()
	ctx, address := t.Context(), pgtest.Database(t)
	conn, other := pgtest.Connect(t, address), pgtest.Connect(t, address)
	pgtest.Exec(t, conn, `INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, epoch, next_offset) VALUES ('g', 't', 0, 5, 10)`)
	for _, call := range []struct {
		args   string
		passes bool
	}{
		{`'g', 't', 0, 6, NULL`, false},
		{`'g', 'u', 0, 5, NULL`, false},
		{`'h', 't', 0, 5, NULL`, false},
		{`'g', 't', 0, 5, NULL`, true},
		{`'g', 't', 0, 5, 10`, true},
		{`'g', 't', 0, 5, 9`, true},
		{`'g', 't', 0, 5, 11`, false},
		{`'g', 't', 0, 4, NULL`, false},
		{`'g', 't', 0, 4, 10`, false},
		{`'g', 't', 1, 5, 10`, false},
	} {
		_, err := conn.Exec(ctx, `SELECT effectonce.check_position(`+call.args+`)`)
		if call.passes {
			require.NoError(t, err, call.args)
		} else {
			require.True(t, pgerr.Is(err, "EO001"), "%s: %v", call.args, err)
		}
	}
	pgtest.Exec(t, other, `SET lock_timeout = '100ms'`)
	for _, args := range []string{`'g', 't', 0, 5, NULL`, `'g', 't', 0, 5, 10`} {
		tx, err := conn.Begin(ctx)
		require.NoError(t, err)
		_, err = tx.Exec(ctx, `SELECT effectonce.check_position(`+args+`)`)
		require.NoError(t, err)
		_, err = other.Exec(ctx, `UPDATE effectonce.consumer_positions SET epoch = 6`)
		require.True(t, pgerr.LockConflict(err), "%v", err)
		require.NoError(t, tx.Rollback(ctx))
	}
}
