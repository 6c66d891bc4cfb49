package idempotency_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Property: Look distinguishes the states of a key, returns the outcome as a replay does, and
// changes no row.
func TestLookTellsTheStateOfAKey(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	op := newOperation(t, pool, idempotency.Config{Seal: newSealer(t, "old", "old")})
	look := func(value string) (idempotency.Response, error) {
		const rows = `SELECT coalesce(string_agg(xmin::text || k::text, ',' ORDER BY key), '') FROM effectonce.idempotency_keys k`
		var before, after string
		require.NoError(t, pool.QueryRow(t.Context(), rows).Scan(&before))
		response, err := op.Look(t.Context(), key(value))
		require.NoError(t, pool.QueryRow(t.Context(), rows).Scan(&after))
		require.Equal(t, before, after)
		return response, err
	}
	_, err := look("never")
	require.ErrorIs(t, err, idempotency.ErrNotStored)

	asked := key("done")
	asked.Fingerprint = idempotency.NewFingerprint([]byte("body"))
	_, err = op.Once(t.Context(), asked, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		_, err := look("done")
		require.ErrorIs(t, err, idempotency.ErrNotStored, "nothing is committed yet")
		return insertOnce("done")(ctx, tx)
	})
	require.NoError(t, err)
	response, err := look("done")
	require.NoError(t, err)
	replayed, err := op.Once(t.Context(), asked, insertOnce("again"))
	require.NoError(t, err)
	require.Equal(t, replayed, response)

	response, err = op.Look(t.Context(), asked)
	require.NoError(t, err)
	require.Equal(t, replayed, response)
	asked.Fingerprint[0]++
	_, err = op.Look(t.Context(), asked)
	require.ErrorIs(t, err, idempotency.ErrMismatch)

	flow := newFlow(t, op, idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{calls(false, func(*step) error {
		_, err := look("flow")
		var busy *idempotency.InProgressError
		require.ErrorAs(t, err, &busy)
		require.Greater(t, busy.RetryAfter, time.Second, "it is locked")
		return errAway
	}), ends("ship")})
	_, err = flow.Do(t.Context(), key("flow"), nil)
	require.ErrorIs(t, err, errAway)
	_, err = look("flow")
	require.ErrorIs(t, err, idempotency.ErrInProgress, "it can be resumed")
	for state, want := range map[string]error{"indeterminate": idempotency.ErrIndeterminate, "abandoned": idempotency.ErrAbandoned} {
		_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET state = $1 WHERE key = 'flow'`, state)
		require.NoError(t, err)
		_, err = look("flow")
		require.ErrorIs(t, err, want)
	}
	for _, bad := range []idempotency.Key{{Scope: "tenant", Operation: "other", Value: "k"}, {Value: "k"}} {
		_, err = op.Look(t.Context(), bad)
		require.ErrorIs(t, err, idempotency.ErrInvalid)
	}
	other := newOperation(t, pool, idempotency.Config{})
	_, err = other.Look(t.Context(), key("done"))
	require.ErrorIs(t, err, idempotency.ErrUnreadable)
}
