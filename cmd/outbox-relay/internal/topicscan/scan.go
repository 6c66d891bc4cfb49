// Package topicscan reads topics up to the end that they had at one moment: the demo's checker,
// "outbox-relay explain", "positions" and "verify" use it.
package topicscan

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	// idleMax is how long a scan waits for records before it gives up. It is above what Kafka needs
	// to end the transaction of a relay that died: the relay's timeout of 30 s, and the 10 s
	// between two of Kafka's checks for timeouts.
	idleMax = time.Minute
	// askMax is how long brokers may take to report what blocks a scan.
	askMax = 5 * time.Second
)

// Place is where Kafka has a record.
type Place struct {
	Topic     string `json:"topic"`
	Partition int32  `json:"partition"`
	Offset    int64  `json:"offset"`
}

// PlaceOf returns the place of a record.
func PlaceOf(r *kgo.Record) Place { return Place{r.Topic, r.Partition, r.Offset} }

func (p Place) String() string { return fmt.Sprintf("%s/%d/%d", p.Topic, p.Partition, p.Offset) }

// ParsePlace reads topic/partition/offset.
func ParsePlace(text string) (p Place, ok bool) {
	parts := strings.Split(text, "/")
	if len(parts) != 3 || parts[0] == "" {
		return p, false
	}
	partition, err := strconv.ParseUint(parts[1], 10, 31)
	offset, offsetErr := strconv.ParseUint(parts[2], 10, 63)
	return Place{parts[0], int32(partition), int64(offset)}, err == nil && offsetErr == nil
}

// Span is what a scan reads of a partition: the offsets from From to before End. Start is the first
// offset that Kafka still has.
type Span struct{ Start, From, End int64 }

// Extent is the spans of a topic's partitions.
type Extent map[int32]Span

// ExtentOf reads the extent of a topic, from a time on, or from the start if the time is zero. A
// topic that does not exist has no partitions.
//
// The end is that of all records, not only of committed ones. Behind the first record of an open
// transaction there may be committed ones, such as those of another shard of the relay.
func ExtentOf(ctx context.Context, client *kgo.Client, since time.Time, topic string) (Extent, error) {
	admin := kadm.NewClient(client)
	// Read the end first: it defines the moment, the other offsets only have to be before it.
	ends, err := admin.ListEndOffsets(ctx, topic)
	err = cmp.Or(err, ends.Error())
	if errors.Is(err, kerr.UnknownTopicOrPartition) {
		return Extent{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the end offsets of topic %s: %w", topic, err)
	}
	starts, err := admin.ListStartOffsets(ctx, topic)
	err = cmp.Or(err, starts.Error())
	from := starts
	if err == nil && !since.IsZero() {
		from, err = admin.ListOffsetsAfterMilli(ctx, max(since.UnixMilli(), 0), topic)
		err = cmp.Or(err, from.Error())
	}
	if err != nil {
		return nil, fmt.Errorf("read the start offsets of topic %s: %w", topic, err)
	}
	extent := Extent{}
	ends.Each(func(end kadm.ListedOffset) {
		start, _ := starts.Lookup(topic, end.Partition)
		first, _ := from.Lookup(topic, end.Partition)
		extent[end.Partition] = Span{Start: start.Offset, From: min(max(first.Offset, start.Offset), end.Offset), End: end.Offset}
	})
	return extent, nil
}

// Scan calls each for every committed record of the extents; those of a partition come in order. An
// error of each ends the scan and is returned. options have to reach the brokers and must not name
// a group.
//
// Scan waits for transactions that are open before the end of an extent. If one hangs, so that no
// record arrives for a minute or until the deadline of ctx, the error names that transaction.
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
	client, err := kgo.NewClient(append(append([]kgo.Opt{kgo.MaxDecompressBatchBytes(InflateMax)}, options...),
		kgo.ConsumePartitions(from),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		// With control records every offset below the end is seen, and the loop below detects the
		// end.
		kgo.KeepControlRecords(),
	)...)
	if err != nil {
		return err
	}
	defer client.Close()
	for left > 0 {
		fetches, err := poll(ctx, client)
		if err != nil {
			err = fmt.Errorf("%d partitions are not read to their end: %w", left, err)
			if why := heldUp(ctx, kadm.NewClient(client), missing); why != nil {
				err = fmt.Errorf("%w: %w", err, why)
			}
			return err
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

// InflateMax bounds what a compressed batch may inflate to: its writer may be hostile.
const InflateMax = 128 << 20

func poll(ctx context.Context, client *kgo.Client) (kgo.Fetches, error) {
	limited, cancel := context.WithTimeout(ctx, idleMax)
	defer cancel()
	fetches := client.PollFetches(limited)
	failed := fetches.Errors()
	switch {
	case len(failed) == 0:
		return fetches, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case limited.Err() != nil:
		return nil, fmt.Errorf("no record arrived for %v", idleMax)
	}
	return nil, fmt.Errorf("topic %s, partition %d: %w", failed[0].Topic, failed[0].Partition, failed[0].Err)
}

// heldUp finds the first transaction that keeps a partition from being read to its end; nil: the
// brokers report none. It asks even after the deadline of ctx, because the transaction may be what
// used up that time.
func heldUp(ctx context.Context, admin *kadm.Client, ends map[string]map[int32]int64) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askMax)
	defer cancel()
	for _, topic := range slices.Sorted(maps.Keys(ends)) {
		if len(ends[topic]) > 0 {
			if open := Open(ctx, admin, topic, ends[topic]); open != nil {
				return open
			}
		}
	}
	return nil
}

// Open describes the first transaction that is open before the end of a partition; nil: the brokers
// report none.
func Open(ctx context.Context, admin *kadm.Client, topic string, ends map[int32]int64) error {
	committed, _ := admin.ListCommittedOffsets(ctx, topic) // an error would only be the reason of what is known
	for _, partition := range slices.Sorted(maps.Keys(ends)) {
		at, known := committed.Lookup(topic, partition)
		if !known || at.Err != nil || at.Offset >= ends[partition] {
			continue
		}
		place := fmt.Sprintf("--topic %s --partition %d", topic, partition)
		return fmt.Errorf("topic %s, partition %d: a transaction is open from offset %d on, and records behind it cannot be read until it ends; "+
			"if it does not end, it hangs: see \"kafka-transactions.sh --bootstrap-server ... find-hanging %s\", and end it with \"... abort %s --start-offset %d\"",
			topic, partition, at.Offset, place, place, at.Offset)
	}
	return nil
}
