package consumer_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
)

// transaction writes values to the topic in a Kafka transaction, and returns once its control
// record is written: a coordinator answers before that.
func (h *harness) transaction(end kgo.TransactionEndTry, values ...string) {
	h.t.Helper()
	behind := h.end() + len(values) + 1
	client := kafkatest.Client(h.t, kgo.TransactionalID(h.topic))
	defer client.Close()
	require.NoError(h.t, client.BeginTransaction())
	for _, value := range values {
		record := &kgo.Record{Topic: h.topic, Key: []byte("k"), Value: []byte(value), Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte(value)}}}
		require.NoError(h.t, client.ProduceSync(h.t.Context(), record).FirstErr())
	}
	require.NoError(h.t, client.EndTransaction(h.t.Context(), end))
	h.wait("the control record", func() bool { return h.end() >= behind })
}

// end is where partition 0 ends.
func (h *harness) end() int {
	h.t.Helper()
	ends, err := kadm.NewClient(kafkatest.Client(h.t)).ListEndOffsets(h.t.Context(), h.topic)
	require.NoError(h.t, err)
	end, _ := ends.Lookup(h.topic, 0)
	return int(end.Offset)
}

const haltedSQL = `SELECT count(*) FROM effectonce.consumer_positions WHERE trouble LIKE '%were deleted%'`

// Property: control records move the position, with the next message or, if none comes, soon: then
// retention that removes everything halts nothing. Records that were deleted before they were
// consumed halt the partition as always, even if there were only control records: nothing shows
// that any more.
func TestControlRecordsMoveThePosition(t *testing.T) {
	t.Parallel()
	for name, settings := range allOrders {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			h.tune = func(c *consumer.Consumer) { consumer.IdleEvery(c, 50*time.Millisecond) }
			stop := h.run(consumer.Each(effect), settings)
			h.transaction(kgo.TryCommit, "k:1", "k:2")
			h.wait("behind what was committed", func() bool { return h.position() == h.end() })
			h.transaction(kgo.TryAbort, "k:x", "k:y")
			require.Equal(t, 6, h.end(), "the test's own premise: two messages and a control record each")
			h.wait("behind what was aborted", func() bool { return h.position() == 6 })
			require.NoError(t, stop())
			deleteRecords(t, h.topic, 6)
			stop = h.run(consumer.Each(effect), settings)
			h.transaction(kgo.TryCommit, "k:3")
			h.waitEffects(3)
			h.wait("position", func() bool { return h.position() == 8 })
			require.NoError(t, stop())
			require.Zero(t, h.number(haltedSQL))

			h.transaction(kgo.TryAbort, "k:z")
			deleteRecords(t, h.topic, 10)
			stop = h.run(consumer.Each(effect), settings)
			h.wait("halts", func() bool { return h.number(haltedSQL) == 1 })
			require.NoError(t, stop())
			require.ElementsMatch(t, []string{"k:1", "k:2", "k:3"}, h.values())
		})
	}
}

// Property: control records after a message in progress do not move the position past it.
func TestControlRecordsDoNotPassAMessageInWork(t *testing.T) {
	t.Parallel()
	for name, settings := range allOrders {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			h.tune = func(c *consumer.Consumer) { consumer.IdleEvery(c, 10*time.Millisecond) }
			begun, goOn := make(chan struct{}, 1), make(chan struct{})
			stop := h.run(consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
				if string(msg.Value) == "slow" {
					select {
					case begun <- struct{}{}:
					default: // tried again
					}
					<-goOn
				}
				return effect(ctx, tx, msg)
			}), settings)
			h.transaction(kgo.TryCommit, "slow")
			<-begun
			h.transaction(kgo.TryAbort, "k:x")
			h.transaction(kgo.TryAbort, "k:y")
			h.produceRecord(&kgo.Record{Key: []byte("other"), Value: []byte("k:2")})
			if name != "by partition" {
				h.waitEffects(1)
			}
			require.Less(t, h.position(), 1)
			close(goOn)
			h.wait("position", func() bool { return h.position() == h.end() })
			require.NoError(t, stop())
			require.Len(t, h.values(), 2)
		})
	}
}
