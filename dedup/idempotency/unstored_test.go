package idempotency_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Property: the completer does not touch a flow whose request is not stored, whenever it is due: it
// would run the remaining phases without the request. The client finishes it.
func TestCompleterNeedsTheRequest(t *testing.T) {
	t.Parallel()
	pool, b := newPool(t), newBank(t)
	op := newOperation(t, pool, idempotency.Config{})
	forClient := newFlow(t, op, idempotency.FlowConfig[payment]{}, paymentPhases(b.URL, false))
	b.refuse = 1
	_, err := forClient.Do(t.Context(), key("k"), []byte("100"))
	require.ErrorIs(t, err, errAway)
	_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET retry_at = clock_timestamp() - interval '1 hour', created_at = created_at - interval '2 hours'`)
	require.NoError(t, err)
	for _, flow := range []*idempotency.Flow[payment]{forClient, newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{StoreRequest: true}, paymentPhases(b.URL, false))} {
		finished, err := flow.Complete(t.Context())
		require.NoError(t, err)
		require.Zero(t, finished)
	}
	asked, _ := b.counts()
	require.Equal(t, 1, asked)
	_, err = forClient.Do(t.Context(), key("k"), []byte("100"))
	require.NoError(t, err)
	require.Equal(t, "100", b.charges[idempotency.Key{Scope: "tenant", Operation: "order", Value: "k"}.ChildID("charge").String()])
}
