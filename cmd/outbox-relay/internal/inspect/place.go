package inspect

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
)

// PlaceState is what Kafka has at a place.
type PlaceState string

// The states. Each one except PlaceRecord and PlaceOpen is a reason why there is no record.
const (
	PlaceRecord      PlaceState = "record"
	PlaceNoTopic     PlaceState = "no_topic"
	PlaceNoPartition PlaceState = "no_partition"
	PlaceDeleted     PlaceState = "deleted"    // before the first offset that Kafka has
	PlaceBeyondEnd   PlaceState = "beyond_end" // not written yet
	// Only a later record of its key, or of its batch, remains.
	PlaceCompacted PlaceState = "compacted"
	PlaceAborted   PlaceState = "aborted" // of a transaction that was aborted: no consumer gets it
	// Of an open transaction, or behind the first record of one: consumers do not get it yet.
	PlaceOpen    PlaceState = "open"
	PlaceControl PlaceState = "control" // the end of a transaction, not a message
)

// At is what Kafka has at the place that was asked for.
type At struct {
	Place

	State      PlaceState `json:"state"`
	Partitions int        `json:"partitions"` // of the topic
	Start      int64      `json:"start"`      // first offset that Kafka has
	End        int64      `json:"end"`        // offset of the next record
}

// at finds what is at a place, and reads the record if there is one.
func (k *Kafka) at(ctx context.Context, place Place) (*At, *kgo.Record, error) {
	at := &At{Place: place}
	extents, err := topicscan.Extents(ctx, k.Client, time.Time{}, place.Topic)
	if err != nil {
		return nil, nil, err
	}
	span, known := extents[place.Topic][place.Partition]
	at.Partitions, at.Start, at.End = len(extents[place.Topic]), span.Start, span.End
	switch {
	case at.Partitions == 0:
		at.State = PlaceNoTopic
	case !known:
		at.State = PlaceNoPartition
	case place.Offset < span.Start:
		at.State = PlaceDeleted
	case place.Offset >= span.End:
		at.State = PlaceBeyondEnd
	}
	if at.State != "" {
		return at, nil, nil
	}
	record, err := k.first(ctx, place)
	if err != nil {
		return nil, nil, err
	}
	switch {
	case record.Offset != place.Offset:
		at.State = PlaceCompacted
	case record.Attrs.IsControl():
		at.State = PlaceControl
	default:
		at.State, err = k.committed(ctx, place, span)
	}
	if err != nil || at.State != PlaceRecord && at.State != PlaceOpen {
		return at, nil, err
	}
	return at, record, nil
}

// topicID returns the ID of a topic.
func (k *Kafka) topicID(ctx context.Context, topic string) (uuid.UUID, error) {
	topics, err := kadm.NewClient(k.Client).ListTopics(ctx, topic)
	if err != nil {
		return uuid.UUID{}, fmt.Errorf("ask for topic %s: %w", topic, err)
	}
	return uuid.UUID(topics[topic].ID), nil
}

// first reads the first record at or after a place, whatever the outcome of its transaction.
func (k *Kafka) first(ctx context.Context, place Place) (*kgo.Record, error) {
	client, err := kgo.NewClient(append(k.Options[:len(k.Options):len(k.Options)],
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{place.Topic: {place.Partition: kgo.NewOffset().At(place.Offset)}}),
		kgo.FetchIsolationLevel(kgo.ReadUncommitted()),
		kgo.KeepControlRecords(),
	)...)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	for {
		fetches := client.PollRecords(ctx, 1)
		if err := fetches.Err(); err != nil {
			return nil, fmt.Errorf("read %s: %w", place, err)
		}
		if records := fetches.Records(); len(records) > 0 {
			return records[0], nil
		}
	}
}

// committed distinguishes a record that consumers get from records of open or aborted transactions.
func (k *Kafka) committed(ctx context.Context, place Place, span topicscan.Span) (PlaceState, error) {
	stable, err := kadm.NewClient(k.Client).ListCommittedOffsets(ctx, place.Topic)
	if err == nil {
		err = stable.Error()
	}
	if err != nil {
		return "", fmt.Errorf("ask which transactions of topic %s are open: %w", place.Topic, err)
	}
	if end, some := stable.Lookup(place.Topic, place.Partition); some {
		span.End = min(span.End, end.Offset)
	}
	if place.Offset >= span.End {
		return PlaceOpen, nil
	}
	state := PlaceAborted
	span.From = place.Offset
	err = topicscan.Scan(ctx, k.Options, map[string]topicscan.Extent{place.Topic: {place.Partition: span}}, func(r *kgo.Record) error {
		if r.Offset == place.Offset {
			state = PlaceRecord
		}
		return errEnough // the first record is enough
	})
	if err != nil && !errors.Is(err, errEnough) {
		return "", err
	}
	return state, nil
}
