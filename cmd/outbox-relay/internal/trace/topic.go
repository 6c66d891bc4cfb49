package trace

import (
	"cmp"
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
	found := Record{Place: topicscan.PlaceOf(r), Time: r.Timestamp, Key: human.Key(r.Key), MessageID: strings.Join(texts, ", ")}
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
func coordinatesID(place topicscan.Place, topicID uuid.UUID) uuid.UUID {
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
		return nil, fmt.Errorf("read the database's clock: %w", err)
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
		place := topicscan.PlaceOf(r)
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

// At is what Kafka has at the place that was asked for.
type At struct {
	topicscan.Place

	// State is record, or open: part of an open transaction, or behind the first record of one. The others are reasons
	// why there is no record: no_topic, no_partition, deleted, beyond_end, compacted, aborted, control.
	State      string `json:"state"`
	Partitions int    `json:"partitions"` // of the topic
	Start      int64  `json:"start"`      // first offset that Kafka has
	End        int64  `json:"end"`        // offset of the next record
	Text       string `json:"-"`          // the state for people; empty: a record
}

// stateDeleted is that of a place before the first offset that Kafka has.
const stateDeleted = "deleted"

// at finds what is at a place, and reads the record if there is one.
func (k *Kafka) at(ctx context.Context, place topicscan.Place) (*At, *kgo.Record, error) {
	at := &At{Place: place}
	is := func(state, format string, args ...any) { at.State, at.Text = state, fmt.Sprintf(format, args...) }
	extent, err := topicscan.ExtentOf(ctx, k.Client, time.Time{}, place.Topic)
	if err != nil {
		return nil, nil, err
	}
	span, known := extent[place.Partition]
	at.Partitions, at.Start, at.End = len(extent), span.Start, span.End
	switch {
	case at.Partitions == 0:
		is("no_topic", "this topic does not exist: was it deleted, or is its name misspelt?")
	case !known:
		is("no_partition", "the topic has %s, from 0 on", human.Count(at.Partitions, "partition"))
	case place.Offset < span.Start:
		is(stateDeleted, "deleted: the partition begins at %d, by the topic's retention or by hand", at.Start)
	case place.Offset >= span.End:
		is("beyond_end", "not written yet: the next offset is %d", at.End)
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
		is("compacted", "no record at this offset any more: the topic is compacted, or was")
		return at, nil, nil
	case record.Attrs.IsControl():
		is("control", "the end marker of a transaction, not a message")
		return at, nil, nil
	}
	switch open, aborted, err := k.transaction(ctx, place); {
	case err != nil:
		return at, nil, err
	case open:
		is("open", "part of an open transaction, or behind the first record of one: consumers get nothing from there on until it ends")
		return at, record, nil
	case aborted:
		is("aborted", "a record of an aborted transaction: consumers do not get it")
		return at, nil, nil
	}
	at.State = "record"
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
func (k *Kafka) first(ctx context.Context, place topicscan.Place, level kgo.IsolationLevel) (*kgo.Record, error) {
	client, err := kgo.NewClient(append(k.Options[:len(k.Options):len(k.Options)],
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{place.Topic: {place.Partition: kgo.NewOffset().At(place.Offset)}}),
		kgo.FetchIsolationLevel(level),
		kgo.KeepControlRecords(),
		kgo.MaxDecompressBatchBytes(topicscan.InflateMax),
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

// transaction reports what keeps consumers from getting a record: its transaction, or one before it, is open, or its
// transaction was aborted.
func (k *Kafka) transaction(ctx context.Context, place topicscan.Place) (open, aborted bool, err error) {
	stable, err := kadm.NewClient(k.Client).ListCommittedOffsets(ctx, place.Topic)
	if err = cmp.Or(err, stable.Error()); err != nil {
		return false, false, fmt.Errorf("ask which transactions of topic %s are open: %w", place.Topic, err)
	}
	if end, some := stable.Lookup(place.Topic, place.Partition); some && place.Offset >= end.Offset {
		return true, false, nil
	}
	record, err := k.first(ctx, place, kgo.ReadCommitted()) // at the latest the end of its transaction
	return false, err == nil && record.Offset != place.Offset, err
}
