package checker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// idleMax is how long a partition may bring nothing before its end before a scan gives up.
const idleMax = 30 * time.Second

// Span is what a scan reads of a partition: the offsets from From on and before End. Start is the first
// offset that Kafka still has.
type Span struct{ Start, From, End int64 }

// Extent is the spans of a topic's partitions.
type Extent map[int32]Span

// Extents asks how far the committed records of topics reach, from a time on, or from the start if it is
// zero. A topic that does not exist has no partitions.
func Extents(ctx context.Context, client *kgo.Client, since time.Time, topics ...string) (map[string]Extent, error) {
	admin := kadm.NewClient(client)
	all := make(map[string]Extent, len(topics))
	for _, topic := range topics {
		// The end first: it is a moment, the others only have to be before it.
		ends, err := admin.ListCommittedOffsets(ctx, topic)
		if err != nil {
			return nil, fmt.Errorf("ask for the end of topic %s: %w", topic, err)
		}
		all[topic] = Extent{}
		if err := ends.Error(); errors.Is(err, kerr.UnknownTopicOrPartition) {
			continue
		} else if err != nil {
			return nil, fmt.Errorf("ask for the end of topic %s: %w", topic, err)
		}
		starts, err := admin.ListStartOffsets(ctx, topic)
		if err == nil {
			err = starts.Error()
		}
		from := starts
		if err == nil && !since.IsZero() {
			if from, err = admin.ListOffsetsAfterMilli(ctx, since.UnixMilli(), topic); err == nil {
				err = from.Error()
			}
		}
		if err != nil {
			return nil, fmt.Errorf("ask for the start of topic %s: %w", topic, err)
		}
		ends.Each(func(end kadm.ListedOffset) {
			start, _ := starts.Lookup(topic, end.Partition)
			first, _ := from.Lookup(topic, end.Partition)
			all[topic][end.Partition] = Span{Start: start.Offset, From: min(max(first.Offset, start.Offset), end.Offset), End: end.Offset}
		})
	}
	return all, nil
}

// Scan calls each with every committed record of the extents; those of a partition come in order. An error
// that each returns ends the scan and is returned. options lead to the brokers; they must not name a group.
func Scan(ctx context.Context, options []kgo.Opt, extents map[string]Extent, each func(*kgo.Record) error) error {
	missing := map[string]map[int32]int64{}
	from := map[string]map[int32]kgo.Offset{}
	left := 0
	for topic, extent := range extents {
		missing[topic], from[topic] = map[int32]int64{}, map[int32]kgo.Offset{}
		for partition, span := range extent {
			if span.From < span.End {
				missing[topic][partition] = span.End
				from[topic][partition] = kgo.NewOffset().At(span.From)
				left++
			}
		}
	}
	if left == 0 {
		return nil
	}
	client, err := kgo.NewClient(append(options[:len(options):len(options)],
		kgo.ConsumePartitions(from),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		// With them every offset below the end is seen, and the loop below knows when it is there.
		kgo.KeepControlRecords(),
	)...)
	if err != nil {
		return err
	}
	defer client.Close()
	for left > 0 {
		fetches, err := poll(ctx, client)
		if err != nil {
			return fmt.Errorf("%d partitions are not read to their end: %w", left, err)
		}
		for record := range fetches.RecordsAll() {
			end, wanted := missing[record.Topic][record.Partition]
			if wanted && record.Offset < end && !record.Attrs.IsControl() {
				if err := each(record); err != nil {
					return err
				}
			}
			if wanted && record.Offset+1 >= end {
				delete(missing[record.Topic], record.Partition)
				client.PauseFetchPartitions(map[string][]int32{record.Topic: {record.Partition}})
				left--
			}
		}
	}
	return nil
}

func poll(ctx context.Context, client *kgo.Client) (kgo.Fetches, error) {
	limited, cancel := context.WithTimeout(ctx, idleMax)
	defer cancel()
	fetches := client.PollFetches(limited)
	if failed := fetches.Errors(); len(failed) > 0 {
		if ctx.Err() == nil && limited.Err() != nil {
			return nil, fmt.Errorf("nothing came for %v", idleMax)
		}
		return nil, fmt.Errorf("topic %s, partition %d: %w", failed[0].Topic, failed[0].Partition, failed[0].Err)
	}
	return fetches, nil
}
