package relay_test

import (
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// Property: when Kafka refuses a batch, nothing that the relay handed over later is published before the
// rows of that batch are tried again. After a refusal the client would go on, under a new epoch.
func TestNothingIsPublishedBehindARefusedBatch(t *testing.T) {
	t.Parallel()
	const rows, page, times = 2000, 10, 20
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
		var batches, refused atomic.Int64
		fake.ControlKey(int16(kmsg.Produce), func(request kmsg.Request) (kmsg.Response, error, bool) {
			fake.KeepControl()
			produce := request.(*kmsg.ProduceRequest)
			var batch kmsg.RecordBatch
			if err := batch.ReadFrom(produce.Topics[0].Partitions[0].Records); err == nil && batch.NumRecords > 1 && batches.Add(1)%5 == 0 && refused.Load() < times {
				refused.Add(1)
				return refuse(produce, kerr.InvalidRecord), nil, true
			}
			return nil, nil, false // also to the rows of a refused batch, which are tried one by one
		})
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) SELECT 'orders', 'k', convert_to(n::text, 'UTF8') FROM generate_series(1, $1::int) n`, rows)
		r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(fake.ListenAddrs()...)}, relay.Config{PageRowsMax: page, ExactlyOnce: exactly})
		require.NoError(t, err)
		starts(t, r)
		testwait.True(t, "all rows are published", func() bool {
			return one[int64](t, pool, `SELECT coalesce(sum(published), 0)::bigint FROM effectonce.outbox_progress_now`) >= rows
		})
		require.Positive(t, refused.Load()) // how many depends on how many rows the client puts into a batch
		last := 0
		for _, value := range valuesAt(t, fake, "orders") {
			n, err := strconv.Atoi(value)
			require.NoError(t, err)
			require.LessOrEqual(t, n, last+1)
			last = max(last, n)
		}
		require.Equal(t, rows, last)
	})
}
