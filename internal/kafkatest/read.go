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

	"github.com/effectonce/effectonce/internal/pause"
)

const (
	readMax     = 2 * time.Minute
	markedEvery = 20 * time.Millisecond
)

// ReadAll returns what a consumer without a group and without our code finds in the topic: every
// committed record up to the end at the time of the call, by partition and offset. It waits for the
// end of transactions that are open, and fails the test if they stay open.
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
	missing, err := offsetsToRead(ctx, kadm.NewClient(client), topic)
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

// marked returns the end of what can be read as committed, which is the end of the topic at the time
// of the call. Brokers acknowledge the end of a transaction before they have marked it in each
// partition; until then its committed records cannot be read, so marked waits for that. It does not
// wait for transactions that begin later, and returns an error if one stays open.
func marked(ctx context.Context, admin *kadm.Client, topic string) (kadm.ListedOffsets, error) {
	all, err := admin.ListEndOffsets(ctx, topic)
	if err != nil {
		return nil, err
	}
	for open := map[int32]int64(nil); ; {
		committed, err := admin.ListCommittedOffsets(ctx, topic)
		if err != nil && (ctx.Err() == nil || len(open) == 0) {
			return nil, err
		}
		if err == nil {
			open = map[int32]int64{}
		}
		all.Each(func(end kadm.ListedOffset) {
			if c, ok := committed.Lookup(topic, end.Partition); ok && c.Offset < end.Offset {
				open[end.Partition] = c.Offset
			}
		})
		if err == nil && len(open) == 0 {
			return committed, nil
		}
		if !pause.For(ctx, markedEvery) {
			return nil, fmt.Errorf("transactions are open, or were not marked in time, from these partitions' offsets on: %v: %w", open, ctx.Err())
		}
	}
}

// offsetsToRead returns the end of each partition that has records before it.
func offsetsToRead(ctx context.Context, admin *kadm.Client, topic string) (map[int32]int64, error) {
	starts, err := admin.ListStartOffsets(ctx, topic)
	if err != nil {
		return nil, err
	}
	ends, err := marked(ctx, admin, topic)
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
