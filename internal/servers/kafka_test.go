package servers_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/servers"
)

func startKafka(t *testing.T, opts servers.KafkaOptions) *servers.Kafka {
	t.Helper()
	began := time.Now()
	k, err := servers.StartKafka(t.Context(), opts)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, k.Stop(context.WithoutCancel(t.Context()))) })
	t.Logf("%s after %s", k.Description, time.Since(began).Round(time.Millisecond))
	return k
}

func client(t *testing.T, k *servers.Kafka, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	c, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(k.Brokers...)}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

// firstRecord is what a careful consumer sees at the start of the topic.
func firstRecord(t *testing.T, k *servers.Kafka, topic string) string {
	t.Helper()
	c := client(t, k, kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	fetches := c.PollRecords(ctx, 1)
	require.NoError(t, fetches.Err())
	return string(fetches.Records()[0].Value)
}

// refuseUnknownTopic: a misspelt name must not pass a test because the broker made the topic.
func refuseUnknownTopic(t *testing.T, k *servers.Kafka) {
	t.Helper()
	c := client(t, k, kgo.AllowAutoTopicCreation(), kgo.UnknownTopicRetries(1))
	err := c.ProduceSync(t.Context(), &kgo.Record{Topic: "misspelt"}).FirstErr()
	require.ErrorIs(t, err, kerr.UnknownTopicOrPartition)
}

// A transaction commits, which shows that the broker reaches itself, and its records survive a
// crash of the broker at the same address.
func TestKafkaKeepsCommittedTransactionThroughKill(t *testing.T) {
	t.Parallel()
	for name, opts := range map[string]servers.KafkaOptions{
		"best kind": {Own: true},
		"kfake":     {Embedded: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := startKafka(t, opts)
			producer := client(t, k, kgo.TransactionalID("producer"), kgo.DefaultProduceTopic("kept"))
			_, err := kadm.NewClient(producer).CreateTopic(t.Context(), 1, -1, nil, "kept")
			require.NoError(t, err)
			require.NoError(t, producer.BeginTransaction())
			require.NoError(t, producer.ProduceSync(t.Context(), kgo.StringRecord("committed")).FirstErr())
			require.NoError(t, producer.EndTransaction(t.Context(), kgo.TryCommit))
			assert.Equal(t, "committed", firstRecord(t, k, "kept"))
			refuseUnknownTopic(t, k)

			if k.Kind != servers.KindContainer {
				require.ErrorContains(t, k.Kill(t.Context()), "no process to kill")
				return
			}
			require.NoError(t, k.Kill(t.Context()))
			began := time.Now()
			require.NoError(t, k.Restart(t.Context()))
			t.Logf("answers again after %s", time.Since(began).Round(time.Millisecond))
			assert.Equal(t, "committed", firstRecord(t, k, "kept"))
		})
	}
}
