package inspect_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/inspect"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/keys"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/outbox"
)

// Property: a request is followed from its key to the row that it published, the record and the
// claim, and what operators did.
func TestExplainFollowsARequest(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	charge, err := idempotency.New(pool, idempotency.Config{Operation: "charge"})
	require.NoError(t, err)
	flow, err := idempotency.NewFlow(charge, idempotency.FlowConfig[struct{}]{},
		idempotency.Phase[struct{}]{Name: "reserve", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[struct{}]) error {
			return outbox.Publish(ctx, tx, outbox.Message{ID: step.ChildID(), Topic: topic})
		}},
		idempotency.Phase[struct{}]{Name: "pay", AtMostOnce: true, Call: func(context.Context, *idempotency.Step[struct{}]) error {
			return errors.New("no answer")
		}})
	require.NoError(t, err)
	key := idempotency.Key{Scope: "t7", Operation: "charge", Value: "two-4127"}
	_, err = flow.Do(t.Context(), key, nil)
	require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	_, err = keys.Retry(t.Context(), pool, "effectonce", operator.By{Who: "ana", Why: "w"}, keys.Place{Scope: "t7", Operation: "charge", Key: "two-4127"}, true)
	require.NoError(t, err)
	publish(t, pool)
	consume(t, pool, topic, consumer.Each(nothing), "SELECT count(*) = 1 FROM effectonce.processed_messages")

	id := key.ChildID("reserve")
	x := explain(t, pool, kafka(t), key.Value)
	require.Len(t, x.Requests, 1)
	assert.Equal(t, []string{key.Value, keys.Running}, []string{x.Requests[0].Key, x.Requests[0].State})
	require.Len(t, x.Outbox, 1)
	assert.Equal(t, id, x.Outbox[0].ID)
	assert.Equal(t, inspect.StatePublished, x.Outbox[0].States["default"])
	require.Len(t, x.Records, 1)
	assert.Equal(t, id.String(), x.Records[0].MessageID)
	assert.Len(t, x.Claims, 1)
	assert.Len(t, x.Actions, 1)
}
