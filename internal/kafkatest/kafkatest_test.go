package kafkatest_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkatest"
)

func values(records []*kgo.Record) (all []string) {
	for _, r := range records {
		all = append(all, fmt.Sprintf("%d/%s", r.Partition, r.Value))
	}
	return all
}

func produce(t *testing.T, client *kgo.Client, topic string, partition int32, value string) {
	t.Helper()
	record := &kgo.Record{Topic: topic, Partition: partition, Value: []byte(value)}
	require.NoError(t, client.ProduceSync(t.Context(), record).FirstErr())
}

func deleteTopic(t *testing.T, brokers []string, topic string) {
	t.Helper()
	admin, err := kadm.NewOptClient(kgo.SeedBrokers(brokers...))
	require.NoError(t, err)
	defer admin.Close()
	_, err = admin.DeleteTopic(context.WithoutCancel(t.Context()), topic)
	assert.NoError(t, err)
}

// ReadAll sees what is committed, once and in order, and ends: where the topic is empty, and where a
// partition ends in a transaction's marker. It fails while a transaction stays open.
func TestReadAllReadsWhatIsCommitted(t *testing.T) {
	t.Parallel()
	for name, brokers := range map[string][]string{
		"best kind": kafkatest.Brokers(t),
		"kfake":     kafkatest.Fake(t).ListenAddrs(),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			topic := kafkatest.TopicAt(t, brokers, 3)
			// Another program may own these brokers
			t.Cleanup(func() { deleteTopic(t, brokers, topic) })
			require.Empty(t, kafkatest.ReadAllAt(t, brokers, topic))

			plain := kafkatest.ClientAt(t, brokers, kgo.RecordPartitioner(kgo.ManualPartitioner()))
			produce(t, plain, topic, 1, "plain 1")
			produce(t, plain, topic, 1, "plain 2")
			produce(t, plain, topic, 0, "plain 3")

			transactional := kafkatest.ClientAt(t, brokers, kgo.TransactionalID(topic), kgo.RecordPartitioner(kgo.ManualPartitioner()))
			for value, end := range map[string]kgo.TransactionEndTry{"committed": kgo.TryCommit, "aborted": kgo.TryAbort} {
				require.NoError(t, transactional.BeginTransaction())
				produce(t, transactional, topic, 2, value)
				require.NoError(t, transactional.EndTransaction(t.Context(), end))
			}
			assert.Equal(t, []string{"0/plain 3", "1/plain 1", "1/plain 2", "2/committed"}, values(kafkatest.ReadAllAt(t, brokers, topic)))

			require.NoError(t, transactional.BeginTransaction())
			produce(t, transactional, topic, 0, "open")
			impatient := &impatient{TB: t}
			assert.PanicsWithValue(t, impatient, func() { kafkatest.ReadAllAt(impatient, brokers, topic) })
			assert.Contains(t, impatient.failed, "transactions are open")
			require.NoError(t, transactional.EndTransaction(t.Context(), kgo.TryAbort))
		})
	}
}

// impatient is a test that is over after a second. It notes why a helper fails it.
type impatient struct {
	testing.TB
	failed string
}

func (i *impatient) Context() context.Context {
	ctx, cancel := context.WithTimeout(i.TB.Context(), time.Second)
	i.Cleanup(cancel)
	return ctx
}

func (i *impatient) Fatalf(format string, args ...any) {
	i.failed = fmt.Sprintf(format, args...)
	panic(i)
}

// A topic is there with its settings during the test, and gone after it.
func TestTopicLastsAsLongAsTheTest(t *testing.T) { //nolint:tparallel // the end of the inner test is the point
	t.Parallel()
	admin := kadm.NewClient(kafkatest.Client(t))
	var topic string
	passed := t.Run("test", func(t *testing.T) {
		topic = kafkatest.Topic(t, 2, "max.message.bytes", "4321")
		configs, err := admin.DescribeTopicConfigs(t.Context(), topic)
		require.NoError(t, err)
		for _, c := range configs[0].Configs {
			if c.Key == "max.message.bytes" {
				assert.Equal(t, "4321", c.MaybeValue())
			}
		}
		produce(t, kafkatest.Client(t), topic, 0, "first")
		assert.Equal(t, "first", string(kafkatest.ReadAll(t, topic)[0].Value))
	})
	require.True(t, passed)
	kafkatest.Gone(t, kafkatest.Brokers(t), topic)
}
