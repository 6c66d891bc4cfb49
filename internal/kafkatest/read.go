package kafkatest

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

const readMax = time.Minute

// ReadAll returns what a consumer without a group and without our code finds in the topic: every
// committed record up to the end at the time of the call, by partition and offset.
func ReadAll(tb testing.TB, topic string) []*kgo.Record {
	tb.Helper()
	return ReadAllAt(tb, Brokers(tb), topic)
}

// ReadAllAt is ReadAll for another cluster.
func ReadAllAt(tb testing.TB, brokers []string, topic string) []*kgo.Record {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), readMax)
	defer cancel()
	client, err := kgo.NewClient(
		kgo.SeedBrokers(brokers...),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		// The end of a partition may be a transaction's marker: without markers the read would
		// never reach the end.
		kgo.KeepControlRecords(),
	)
	if err != nil {
		tb.Fatalf("open a Kafka client: %v", err)
	}
	defer client.Close()
	missing, err := offsetsToRead(ctx, tb, kadm.NewClient(client), topic)
	if err != nil {
		tb.Fatalf("list the offsets of topic %s: %v", topic, err)
	}
	from := map[int32]kgo.Offset{}
	for partition := range missing {
		from[partition] = kgo.NewOffset().AtStart()
	}
	client.AddConsumePartitions(map[string]map[int32]kgo.Offset{topic: from})
	var records []*kgo.Record
	for len(missing) > 0 {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			tb.Fatalf("read topic %s: %v; the end of these partitions was not reached: %v", topic, err, missing)
		}
		for record := range fetches.RecordsAll() {
			end, wanted := missing[record.Partition]
			if wanted && record.Offset < end && !record.Attrs.IsControl() {
				records = append(records, record)
			}
			if record.Offset >= end-1 {
				delete(missing, record.Partition)
			}
		}
	}
	slices.SortFunc(records, func(a, b *kgo.Record) int {
		return cmp.Or(cmp.Compare(a.Partition, b.Partition), cmp.Compare(a.Offset, b.Offset))
	})
	return records
}

// markedMax is how long ReadAll waits for the markers of transactions, and so for a transaction
// that is open.
const (
	markedMax   = 10 * time.Second
	markedEvery = 20 * time.Millisecond
)

// marked returns the end of what can be read as committed. Brokers acknowledge the end of a
// transaction before they have marked it in each partition; until then its committed records cannot
// be read. marked waits for transactions that existed at its call, not for ones that begin later.
// If it returns less than all, it logs that. That is correct only below an open transaction: a
// caller that polls, or that knows of one, continues.
func marked(ctx context.Context, tb testing.TB, admin *kadm.Client, topic string) (kadm.ListedOffsets, error) {
	tb.Helper()
	all, err := admin.ListEndOffsets(ctx, topic)
	if err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(markedMax); ; {
		committed, err := admin.ListCommittedOffsets(ctx, topic)
		if err != nil {
			return nil, err
		}
		open := map[int32]int64{}
		all.Each(func(end kadm.ListedOffset) {
			if c, ok := committed.Lookup(topic, end.Partition); ok && c.Offset < end.Offset {
				open[end.Partition] = c.Offset
			}
		})
		if len(open) == 0 {
			return committed, nil
		}
		if time.Now().After(deadline) {
			tb.Logf("topic %s: transactions are open, or not marked within %v, from these partitions' offsets on: %v; the records behind them are not read", topic, markedMax, open)
			return committed, nil
		}
		timer := time.NewTimer(markedEvery)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil, ctx.Err()
		case <-timer.C:
		}
	}
}

// Marked waits until brokers have marked the end of each transaction in a topic, which they
// acknowledge before. No transaction may be open.
func Marked(tb testing.TB, topic string) {
	tb.Helper()
	admin := kadm.NewClient(Client(tb))
	until(tb, "transactions are marked in topic "+topic, func(ctx context.Context) error {
		ends, err := admin.ListEndOffsets(ctx, topic)
		if err != nil {
			return err
		}
		committed, err := admin.ListCommittedOffsets(ctx, topic)
		if err != nil {
			return err
		}
		ends.Each(func(end kadm.ListedOffset) {
			if c, ok := committed.Lookup(topic, end.Partition); !ok || c.Offset < end.Offset {
				err = fmt.Errorf("partition %d: the last one is at %d, the end of what is committed at %d", end.Partition, end.Offset, c.Offset)
			}
		})
		return cmp.Or(err, ends.Error(), committed.Error())
	})
}

// offsetsToRead returns the end of each partition that has records before it.
func offsetsToRead(ctx context.Context, tb testing.TB, admin *kadm.Client, topic string) (map[int32]int64, error) {
	tb.Helper()
	starts, err := admin.ListStartOffsets(ctx, topic)
	if err != nil {
		return nil, err
	}
	ends, err := marked(ctx, tb, admin, topic)
	if err != nil {
		return nil, err
	}
	missing := map[int32]int64{}
	ends.Each(func(end kadm.ListedOffset) {
		if start, ok := starts.Lookup(topic, end.Partition); ok && start.Offset < end.Offset {
			missing[end.Partition] = end.Offset
		}
	})
	if err := cmp.Or(starts.Error(), ends.Error()); err != nil {
		return nil, err
	}
	return missing, nil
}
