package integration_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/doctor"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// The doctor tells a direct connection from one through a pooler, and statement mode, in which nothing works, from
// the others.
func TestDoctorKnowsPoolers(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	look := func(address string) doctor.Finding {
		found := doctor.Pooler(t.Context(), func(ctx context.Context) (*pgx.Conn, error) { return pgx.Connect(ctx, address) })
		require.Len(t, found, 1)
		return found[0]
	}
	direct := look(address)
	assert.Equal(t, doctor.OK, direct.Severity)
	assert.Contains(t, direct.Message, "directly")
	for mode, want := range map[string]string{"transaction": "(transaction mode)", "session": "(session mode, or busy in transaction mode)"} {
		f := look(newPooler(t, address, "pool_mode = "+mode).url(describeOnly))
		assert.Equal(t, doctor.OK, f.Severity, "%+v", f)
		assert.Contains(t, f.Message, want)
	}
	f := look(newPooler(t, address, "pool_mode = statement").url(describeOnly))
	assert.Equal(t, doctor.Fail, f.Severity, "%+v", f)
	assert.Contains(t, f.Message, "statement mode")
	assert.Contains(t, f.Remedy, "pool_mode = transaction")
}
