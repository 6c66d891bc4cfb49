package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Property: a status that is not a final answer is rejected before anything is stored, whether the
// outcome came from the work, Final or Config.Failed. It would panic wherever it is sent, at each
// replay.
func TestStatusThatIsNoAnswerIsRefused(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	plain := newOperation(t, pool, idempotency.Config{})
	for status, refused := range map[int]bool{-1: true, 0: false, 1: true, 99: true, 100: true, 199: true, 200: false, 999: false, 1000: true} {
		response := idempotency.Response{Status: status}
		strict := newOperation(t, pool, idempotency.Config{Strict: true, Failed: func(error) idempotency.Response { return response }})
		for name, test := range map[string]struct {
			op  *idempotency.Operation
			err error
		}{"work": {plain, nil}, "Final": {plain, idempotency.Final(response, errors.New("declined"))}, "Failed": {strict, errors.New("no paper")}} {
			what := fmt.Sprint(name, " ", status)
			_, err := test.op.Once(t.Context(), key(what), func(context.Context, pgx.Tx) (idempotency.Response, error) { return response, test.err })
			if refused {
				require.ErrorContains(t, err, fmt.Sprintf("has status %d: want 0, or 200 to 999", status), what)
			} else {
				require.NoError(t, err, what)
			}
			require.Equal(t, !refused, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE key = $1`, what) == 1, what)
		}
	}
}
