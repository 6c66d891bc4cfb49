package replay

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/record"
)

// row is a row of the outbox and its record.
type row struct {
	seq    int64
	id     uuid.UUID
	bytes  int // as the relay counts them
	record *kgo.Record
}

// sender publishes pages so that no row of a key passes an earlier one that Kafka does not accept.
// Otherwise a consumer of a new topic would apply them in the wrong order: the refused row would be
// sent behind them when the replay is run again.
type sender struct {
	client *kgo.Client

	mu sync.Mutex
	// Of records, by topic: read once, since the client's batch size is also fixed
	sizes map[string]int32
	// unknown are topics whose limit the brokers withhold: Kafka's default applies.
	unknown map[string]error
}

func newSender(kafka []kgo.Opt) (*sender, error) {
	s := &sender{sizes: map[string]int32{}, unknown: map[string]error{}}
	placing, err := record.PartitionerOption(kafka)
	if err != nil {
		return nil, fmt.Errorf("kafka options: %w", err)
	}
	s.client, err = kgo.NewClient(append(kafka[:len(kafka):len(kafka)],
		kgo.RequiredAcks(kgo.AllISRAcks()),
		kgo.SoftwareNameAndVersion("outbox-relay", "v1"),
		kgo.ProducerBatchMaxBytesFn(s.recordBytes),
		// A refused batch fails everything that is buffered for its partition, so all of a page has
		// to be buffered.
		kgo.ManualFlushing(),
		placing,
	)...)
	if err != nil {
		return nil, fmt.Errorf("kafka options: %w", err)
	}
	return s, nil
}

// exists refuses a topic that Kafka does not have.
func (s *sender) exists(ctx context.Context, topic string) error {
	topics, err := kadm.NewClient(s.client).ListTopics(ctx, topic)
	if err != nil {
		return fmt.Errorf("describe topic %s: %w", topic, err)
	}
	if err := topics[topic].Err; err != nil || !topics.Has(topic) {
		return fmt.Errorf("topic %s: %w: nothing was published; create it, or check the name", topic, cmp.Or(err, error(kerr.UnknownTopicOrPartition)))
	}
	return nil
}

func (s *sender) recordBytes(topic string) int32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n, known := s.sizes[topic]; known {
		return n
	}
	return record.BytesDefault
}

// learn reads the limits of topics that are new.
func (s *sender) learn(ctx context.Context, rows []row) error {
	var topics []string
	for _, r := range rows {
		if _, known := s.sizes[r.record.Topic]; !known && !slices.Contains(topics, r.record.Topic) {
			topics = append(topics, r.record.Topic)
		}
	}
	found := record.Limits(ctx, s.client, topics...)
	s.mu.Lock()
	defer s.mu.Unlock()
	for topic, limit := range found {
		switch {
		case limit.Err == nil:
			s.sizes[topic] = limit.Bytes
		case limit.Withheld():
			s.sizes[topic], s.unknown[topic] = record.BytesDefault, limit.Err
		default:
			// The default would apply, and a row that the topic accepts would end the replay
			return limit.Err
		}
	}
	return nil
}

// send publishes the rows before the first one that is too large for its topic, and returns how
// many Kafka accepted.
func (s *sender) send(ctx context.Context, rows []row) (published int64, err error) {
	if err := s.learn(ctx, rows); err != nil {
		return 0, err
	}
	var tooLarge error
	for i, r := range rows {
		if most := s.recordBytes(r.record.Topic); r.bytes > int(most) {
			tooLarge = fmt.Errorf("row %d (id %s) has %d bytes as a record, max.message.bytes of topic %q is %d: raise it and run the replay again, "+
				"or end it before this row and continue behind it", r.seq, r.id, r.bytes, r.record.Topic, most)
			if err := s.unknown[r.record.Topic]; err != nil {
				tooLarge = fmt.Errorf("row %d (id %s) has %d bytes as a record, and it is unknown how many topic %q accepts: grant DESCRIBE_CONFIGS on it (%w) and run the replay again",
					r.seq, r.id, r.bytes, r.record.Topic, err)
			}
			rows = rows[:i]
			break
		}
	}
	published, err = s.produce(ctx, rows)
	if err == nil {
		err = tooLarge
	}
	return published, err
}

// produce returns when every row is answered, or ctx has ended.
func (s *sender) produce(ctx context.Context, rows []row) (published int64, err error) {
	var mu sync.Mutex
	var taken int64
	errs := make([]error, len(rows))
	for i, r := range rows {
		s.client.Produce(ctx, r.record, func(_ *kgo.Record, err error) {
			mu.Lock()
			defer mu.Unlock()
			if errs[i] = err; err == nil {
				taken++
			}
		})
	}
	ended := s.client.Flush(ctx)
	mu.Lock()
	defer mu.Unlock()
	for i, err := range errs {
		if err != nil { // of a batch: any of its rows may be the refused one
			return taken, fmt.Errorf("publish row %d (id %s), or one behind it, to topic %q: %w", rows[i].seq, rows[i].id, rows[i].record.Topic, err)
		}
	}
	if ended != nil {
		return taken, fmt.Errorf("publish: %w", ended)
	}
	return taken, nil
}
