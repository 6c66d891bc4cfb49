package servers_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/servers"
)

// Property: of three brokers any one may be killed: transactions still commit, what was committed is
// there, and the broker comes back at its address.
func TestThreeBrokersBearTheDeathOfOne(t *testing.T) {
	t.Parallel()
	k := startKafka(t, servers.KafkaOptions{Own: true, Count: 3})
	require.Len(t, k.Brokers, 3)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	producer := client(t, k, kgo.TransactionalID("producer"), kgo.DefaultProduceTopic("kept"), kgo.RecordDeliveryTimeout(2*time.Minute))
	_, err := kadm.NewClient(producer).CreateTopic(ctx, 1, -1, nil, "kept")
	require.NoError(t, err)
	write := func(text string) {
		t.Helper()
		require.NoError(t, producer.BeginTransaction())
		require.NoError(t, producer.ProduceSync(ctx, kgo.StringRecord(text)).FirstErr())
		require.NoError(t, producer.EndTransaction(ctx, kgo.TryCommit))
	}
	write("committed")
	if k.Kind != servers.KindContainer {
		t.Log("kfake has no processes to kill")
		return
	}
	require.NoError(t, k.Kill(ctx))
	write("while one is down")
	assert.Equal(t, "committed", firstRecord(t, k, "kept"))
	require.NoError(t, k.Restart(ctx))
	require.NoError(t, k.Kill(ctx), "the next one")
	write("while another one is down")
	require.NoError(t, k.Restart(ctx))
}
