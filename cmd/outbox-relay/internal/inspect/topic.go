package inspect

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
	"github.com/effectonce/effectonce/dedup"
)

// Kafka has what is needed to read topics: a client for requests, and the options to reach the
// brokers.
type Kafka struct {
	Client  *kgo.Client
	Options []kgo.Opt
}

// clockSlack is how much the clocks of database, relay and brokers may differ.
const clockSlack = time.Minute

// errEnough ends a scan before its end.
var errEnough = errors.New("enough")

// addRecord adds a record of the message, with the IDs that it carries.
func (e *explainer) addRecord(r *kgo.Record) (texts []string) {
	texts, scope := e.carried(r)
	found := Record{Place: Place{r.Topic, r.Partition, r.Offset}, Time: r.Timestamp, Key: human.Key(r.Key), MessageID: strings.Join(texts, ", ")}
	if r.Value != nil {
		found.PayloadBytes = new(int64(len(r.Value)))
	}
	e.out.Records = append(e.out.Records, found)
	e.addScope(scope)
	for _, text := range texts {
		e.names.addText(text)
	}
	return texts
}

// coordinatesID returns the ID of a record that carries none, as the consumer computes it.
func coordinatesID(place Place, topicID uuid.UUID) uuid.UUID {
	raw := append([]byte{}, topicID[:]...)
	raw = binary.BigEndian.AppendUint32(raw, uint32(place.Partition))
	raw = binary.BigEndian.AppendUint64(raw, uint64(place.Offset))
	return dedup.MessageID("effectonce:coordinates:"+place.Topic, raw)
}

// PartitionOf returns the partition to which the relay sends a key, as Kafka's own clients do;
// false: it may be any partition.
func PartitionOf(key []byte, partitions int) (int32, bool) {
	if key == nil || partitions == 0 {
		return 0, false
	}
	p := kgo.StickyKeyPartitioner(nil).ForTopic("").Partition(&kgo.Record{Key: key}, partitions)
	return int32(p), true
}

// HashOf returns the number from which PartitionOf computes the partition, by its remainder; -1: it
// may be any partition.
func HashOf(key []byte) int32 {
	if p, known := PartitionOf(key, 1<<31); known {
		return p
	}
	return -1
}

// target is the part of a topic to search.
type target struct {
	topic string
	since time.Time
	key   []byte // only its partition; nil: all
}

// targets returns where the outbox row says the message goes, else every topic that a consumer
// reads.
func (e *explainer) targets(ctx context.Context) (all []target, err error) {
	if len(e.Topics) == 0 {
		for _, row := range e.out.Outbox {
			all = append(all, target{topic: row.Topic, since: row.CreatedAt.Add(-clockSlack), key: row.Key})
		}
		for _, row := range e.out.Dead {
			all = append(all, target{topic: row.Topic, since: row.HeldAt.Add(-24 * time.Hour), key: row.Key})
		}
		for _, row := range e.out.Scheduled { // a scheduled message is in no topic
			all = append(all, target{topic: row.Topic, since: row.CreatedAt.Add(-clockSlack), key: row.Key})
		}
		if len(all) > 0 {
			return all, nil
		}
	}
	var now time.Time
	if err := e.db.QueryRow(ctx, clockSQL).Scan(&now); err != nil {
		return nil, wrap("read the database's clock", err)
	}
	since, ok := e.names.time(now)
	if len(e.out.Records) > 0 {
		since, ok = e.out.Records[0].Time, true
	}
	if !ok {
		since = now.Add(-e.Since)
	}
	topics := e.Topics
	if len(topics) == 0 {
		topics = e.scopes
	}
	if e.place != nil {
		topics = []string{e.place.Topic}
	}
	for _, topic := range topics {
		all = append(all, target{topic: topic, since: since.Add(-clockSlack)})
	}
	return all, nil
}

// searchTopics looks for records of the message, including duplicates, from the time of its row or
// ID on.
func (e *explainer) searchTopics(ctx context.Context) error {
	if e.kafka == nil || len(e.names.ids) == 0 && len(e.names.texts) == 0 {
		return nil
	}
	targets, err := e.targets(ctx)
	if err != nil || len(targets) == 0 {
		return err
	}
	search := &Search{Topics: []string{}, Since: targets[0].since, Complete: true}
	e.out.Searched = search
	for _, t := range targets {
		search.Topics = append(search.Topics, t.topic)
		if t.since.Before(search.Since) {
			search.Since = t.since
		}
		if err := e.askKafka(ctx, func(ctx context.Context) error { return e.search(ctx, t, search) }); err != nil {
			return err
		}
	}
	search.Complete = search.Complete && e.out.KafkaError == ""
	slices.Sort(search.Topics)
	search.Topics = slices.Compact(search.Topics)
	return nil
}

func (e *explainer) search(ctx context.Context, t target, search *Search) error {
	extent, err := topicscan.ExtentOf(ctx, e.kafka.Client, t.since, t.topic)
	if err != nil {
		return err
	}
	if len(extent) == 0 && !slices.Contains(search.Missing, t.topic) {
		search.Missing = append(search.Missing, t.topic)
	}
	if p, one := PartitionOf(t.key, len(extent)); one {
		extent = topicscan.Extent{p: extent[p]}
	}
	err = topicscan.Scan(ctx, e.kafka.Options, map[string]topicscan.Extent{t.topic: extent}, func(r *kgo.Record) error {
		if search.Records >= e.ScanMax {
			return errEnough
		}
		search.Records++
		if !e.match(r) {
			return nil
		}
		place := Place{r.Topic, r.Partition, r.Offset}
		if slices.ContainsFunc(e.out.Records, func(known Record) bool { return known.Place == place }) {
			return nil
		}
		e.addRecord(r)
		return nil
	})
	if errors.Is(err, errEnough) {
		search.Complete, err = false, nil
	}
	return err
}

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
	extent, err := topicscan.ExtentOf(ctx, k.Client, time.Time{}, place.Topic)
	if err != nil {
		return nil, nil, err
	}
	span, known := extent[place.Partition]
	at.Partitions, at.Start, at.End = len(extent), span.Start, span.End
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
	record, err := k.first(ctx, place, kgo.ReadUncommitted())
	if err != nil {
		return nil, nil, err
	}
	switch {
	case record.Offset != place.Offset:
		at.State = PlaceCompacted
	case record.Attrs.IsControl():
		at.State = PlaceControl
	default:
		at.State, err = k.committed(ctx, place)
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

// first reads the first record at or after a place that the isolation level shows.
func (k *Kafka) first(ctx context.Context, place Place, level kgo.IsolationLevel) (*kgo.Record, error) {
	client, err := kgo.NewClient(append(k.Options[:len(k.Options):len(k.Options)],
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{place.Topic: {place.Partition: kgo.NewOffset().At(place.Offset)}}),
		kgo.FetchIsolationLevel(level),
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
func (k *Kafka) committed(ctx context.Context, place Place) (PlaceState, error) {
	stable, err := kadm.NewClient(k.Client).ListCommittedOffsets(ctx, place.Topic)
	if err == nil {
		err = stable.Error()
	}
	if err != nil {
		return "", fmt.Errorf("ask which transactions of topic %s are open: %w", place.Topic, err)
	}
	if end, some := stable.Lookup(place.Topic, place.Partition); some && place.Offset >= end.Offset {
		return PlaceOpen, nil
	}
	record, err := k.first(ctx, place, kgo.ReadCommitted()) // at the latest the end of its transaction
	if err != nil || record.Offset == place.Offset {
		return PlaceRecord, err
	}
	return PlaceAborted, nil
}
