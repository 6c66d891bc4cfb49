package inspect

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
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

func newRecord(r *kgo.Record, texts []string) Record {
	found := Record{Place: Place{r.Topic, r.Partition, r.Offset}, Time: r.Timestamp, Key: human.Key(r.Key), MessageID: strings.Join(texts, ", ")}
	if r.Value != nil {
		n := int64(len(r.Value))
		found.PayloadBytes = &n
	}
	return found
}

// addRecord adds a record of the message, with the IDs that it carries.
func (e *explainer) addRecord(r *kgo.Record) (texts []string) {
	texts, scope := e.carried(r)
	e.out.Records = append(e.out.Records, newRecord(r, texts))
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
	key   []byte
	keyed bool // only the key's partition
}

// targets returns where the outbox row says the message goes, else every topic that a consumer
// reads.
func (e *explainer) targets(ctx context.Context) (all []target, err error) {
	if len(e.Topics) == 0 {
		for _, row := range e.out.Outbox {
			all = append(all, target{topic: row.Topic, since: row.CreatedAt.Add(-clockSlack), key: row.Key, keyed: row.Key != nil})
		}
		for _, row := range e.out.Dead {
			all = append(all, target{topic: row.Topic, since: row.HeldAt.Add(-24 * time.Hour), key: row.Key, keyed: row.Key != nil})
		}
		for _, row := range e.out.Scheduled { // a scheduled message is in no topic
			all = append(all, target{topic: row.Topic, since: row.CreatedAt.Add(-clockSlack), key: row.Key, keyed: row.Key != nil})
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
	extents, err := topicscan.Extents(ctx, e.kafka.Client, t.since, t.topic)
	if err != nil {
		return err
	}
	extent := extents[t.topic]
	if len(extent) == 0 && !slices.Contains(search.Missing, t.topic) {
		search.Missing = append(search.Missing, t.topic)
	}
	if p, one := PartitionOf(t.key, len(extent)); t.keyed && one {
		extents[t.topic] = topicscan.Extent{p: extent[p]}
	}
	err = topicscan.Scan(ctx, e.kafka.Options, extents, func(r *kgo.Record) error {
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
