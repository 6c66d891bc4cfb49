package idempotency_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Property: a serialization failure or a deadlock, which does not depend on the request, never
// becomes its outcome and uses up no attempt, even if it recurs at every retry: neither with
// Strict, nor with AttemptsMax. Row H20 of guarantees.md.
func TestConflictIsNoOutcome(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	for name, cfg := range map[string]idempotency.Config{"strict": {Strict: true, Retries: 2}, "bounded": {AttemptsMax: 1, Retries: 2}} {
		for _, code := range []string{"40001", "40P01"} {
			o, value, conflicts := newOperation(t, pool, cfg), name+code, 7
			ask := func() (idempotency.Response, error) {
				return o.Once(t.Context(), key(value), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
					if conflicts--; conflicts >= 0 {
						return idempotency.Response{}, &pgconn.PgError{Code: code}
					}
					return idempotency.Response{Status: 201}, effect(ctx, tx, value)
				})
			}
			for range 2 { // three executions each
				_, err := ask()
				var conflict *pgconn.PgError
				require.ErrorAs(t, err, &conflict, value)
				require.Equal(t, code, conflict.Code)
				require.Zero(t, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE key = $1`, value))
			}
			response, err := ask()
			require.NoError(t, err)
			require.Equal(t, idempotency.Response{Status: 201}, response, value)
			require.Equal(t, 1, effects(t, pool, value))
		}
	}
}
