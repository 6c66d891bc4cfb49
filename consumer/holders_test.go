package consumer_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
)

// Property: two holders that take a partition from each other back off: in ten seconds there are a
// few epochs, not one for each transaction. Whatever they do, each message has its effect once.
func TestTwoHoldersDoNotTakeAPartitionBackAndForth(t *testing.T) {
	longtest.Only(t, "it counts takeovers in real time")
	t.Parallel()
	for _, order := range []consumer.Order{consumer.OrderByPartition, consumer.OrderByKey, consumer.OrderUnordered} {
		t.Run(fmt.Sprint(order), func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			const n = 2000
			records := make([]*kgo.Record, n)
			client := kafkatest.Client(t, kgo.RecordPartitioner(kgo.ManualPartitioner()))
			defer client.Close()
			for i := range records {
				records[i] = &kgo.Record{Topic: h.topic, Value: []byte(fmt.Sprint(i)), Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte(fmt.Sprint(i))}}}
			}
			require.NoError(t, client.ProduceSync(t.Context(), records...).FirstErr())
			settings := func(c *consumer.Config) { c.BatchMax, c.Order = 1, order }
			slow := consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
				if _, err := tx.Exec(ctx, `SELECT pg_sleep(0.02)`); err != nil { // there is work for as long as the test observes
					return err
				}
				return effect(ctx, tx, msg)
			})
			stop := h.run(slow, settings)
			h.wait("the first holder works", func() bool { return h.number(`SELECT count(*) FROM effects`) > 10 })
			cfg := consumer.Config{Group: h.topic, Topics: []string{h.topic}, RetryMin: time.Millisecond, RetryMax: 50 * time.Millisecond}
			settings(&cfg)
			other, err := consumer.New(h.pool, nil, slow, cfg)
			require.NoError(t, err)
			const epochs = `SELECT max(epoch) FROM effectonce.consumer_positions`
			before, begun := h.number(epochs), time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			_, _ = other.Deliver(ctx, records...)
			taken := h.number(epochs) - before
			t.Logf("%d epochs in %v", taken, time.Since(begun))
			require.GreaterOrEqual(t, taken, 2, "they did take it from each other")
			require.LessOrEqual(t, taken, 12)
			require.NoError(t, stop())
			require.Equal(t, h.number(`SELECT count(*) FROM effects`), h.number(`SELECT count(DISTINCT message_id) FROM effects`))
		})
	}
}
