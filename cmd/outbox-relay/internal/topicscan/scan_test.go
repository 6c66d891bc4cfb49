package topicscan_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// openTransaction has records of a transaction at the offsets 0 and 2 of a topic's only partition,
// and a plain one between. end ends it.
func openTransaction(t *testing.T) (topic string, end func(kgo.TransactionEndTry) error) {
	t.Helper()
	topic = kafkatest.Topic(t, 1)
	open, plain := kafkatest.Client(t, kgo.TransactionalID(topic)), kafkatest.Client(t)
	require.NoError(t, open.BeginTransaction())
	for _, client := range []*kgo.Client{open, plain, open} {
		require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: topic}).FirstErr())
	}
	return topic, func(how kgo.TransactionEndTry) error {
		return open.EndTransaction(context.WithoutCancel(t.Context()), how)
	}
}

// Property: records behind the first record of an open transaction belong to what a scan reads. The
// scan waits for the transaction, and ends whatever the transaction's outcome, also if the last
// records before the end are void.
func TestScanWaitsForOpenTransactions(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		end  kgo.TransactionEndTry
		want []int64
	}{
		"committed": {kgo.TryCommit, []int64{0, 1, 2}},
		"aborted":   {kgo.TryAbort, []int64{1}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			topic, end := openTransaction(t)
			extent, err := topicscan.ExtentOf(t.Context(), kafkatest.Client(t), time.Time{}, topic)
			require.NoError(t, err)
			ended := make(chan error, 1)
			go func() { ended <- end(c.end) }()
			var offsets []int64
			err = topicscan.Scan(t.Context(), []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}, map[string]topicscan.Extent{topic: extent}, func(r *kgo.Record) error {
				offsets = append(offsets, r.Offset)
				return nil
			})
			require.NoError(t, testwait.Chan(t, "the transaction's end", ended))
			require.NoError(t, err)
			assert.Equal(t, c.want, offsets)
		})
	}
}

// Property: a transaction that hangs ends a scan with an error that says where it is and how to end
// it.
func TestScanNamesTheTransactionThatHangs(t *testing.T) {
	t.Parallel()
	topic, end := openTransaction(t)
	defer func() { assert.NoError(t, end(kgo.TryAbort)) }()
	extent, err := topicscan.ExtentOf(t.Context(), kafkatest.Client(t), time.Time{}, topic)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond) // the look for the transaction has its own limit
	defer cancel()
	err = topicscan.Scan(ctx, []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}, map[string]topicscan.Extent{topic: extent}, func(*kgo.Record) error { return nil })
	require.ErrorContains(t, err, "topic "+topic+", partition 0: a transaction is open from offset 0 on")
	require.ErrorContains(t, err, "abort --topic "+topic+" --partition 0 --start-offset 0")
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

func TestMain(m *testing.M) { pgtest.Main(m) }
