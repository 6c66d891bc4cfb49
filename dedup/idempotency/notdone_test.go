package idempotency_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Property: a call that must not be repeated is made again by the next request if the foreign
// system says that it did nothing: the key is not in doubt, and no person has to decide. Row H5 of
// guarantees.md.
func TestCallThatWasNotDoneIsMadeAgain(t *testing.T) {
	t.Parallel()
	pool, b := newPool(t), newBank(t)
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, paymentPhases(b.URL, true))
	b.refuse = 2
	for range 2 {
		_, err := flow.Do(t.Context(), key("k"), []byte("100"))
		require.ErrorIs(t, err, errAway)
		require.NotErrorIs(t, err, idempotency.ErrIndeterminate)
		require.Equal(t, 1, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'running' AND calling IS NULL`))
	}
	requirePaidOnce(t, pool, b)
	asked, _ := b.counts()
	require.Equal(t, 3, asked)
}
