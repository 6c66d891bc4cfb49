package relay

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/limits"
)

// topics knows which topics exist and how large their records may be, so that a row that Kafka would
// refuse is recognised before it is produced: a refusal afterwards would come when later rows of its key
// are under way.
type topics struct {
	mu    sync.Mutex
	known map[string]topicState
}

type topicState struct {
	exists   bool
	refusal  error // of the whole topic; nil: none known
	maxBytes int32
	asked    time.Time
}

// topicMaxAge is how long the limits of an existing topic are believed. A topic that is missing is asked
// for again each time dead rows are looked at.
const topicMaxAge = time.Minute

func newTopics() *topics { return &topics{known: map[string]topicState{}} }

func (t *topics) get(name string) (topicState, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s, ok := t.known[name]
	return s, ok && time.Since(s.asked) < topicMaxAge
}

// maxBytes is asked by the client when it first produces to a topic: a batch must not be larger than a
// single record may be.
func (t *topics) maxBytes(name string) int32 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s, ok := t.known[name]; ok && s.exists {
		return s.maxBytes
	}
	return limits.RecordBytesDefault
}

// errLimitsChanged asks for a new client: batch sizes are fixed when a client first meets a topic.
var errLimitsChanged = errors.New("max.message.bytes of a topic changed: starting over with a new client")

// learn gets to know topics. A sink says what it does not take when it is handed it.
func (p *publisher) learn(ctx context.Context, names []string) error {
	if p.cfg.Sink == nil {
		ctx, cancel := p.asking(ctx)
		defer cancel()
		return fromOutlet(p.topics.learn(ctx, p.client, names))
	}
	found := map[string]topicState{}
	for _, name := range names {
		found[name] = topicState{exists: true, maxBytes: math.MaxInt32}
	}
	return p.topics.store(found)
}

// learn asks the brokers about topics. It waits while no broker answers.
func (t *topics) learn(ctx context.Context, client *kgo.Client, names []string) error {
	admin := kadm.NewClient(client)
	details, err := admin.ListTopics(ctx, names...)
	if err != nil {
		return fmt.Errorf("ask Kafka for topics %q: %w", names, err)
	}
	var existing []string
	found := map[string]topicState{}
	for _, name := range names {
		d, ok := details[name]
		switch {
		case ok && d.Err == nil:
			existing = append(existing, name)
		case !ok || errors.Is(d.Err, kerr.UnknownTopicOrPartition) || errors.Is(d.Err, kerr.InvalidTopicException) || errors.Is(d.Err, kerr.UnknownTopicID):
			found[name] = topicState{}
		case errors.Is(d.Err, kerr.TopicAuthorizationFailed):
			found[name] = topicState{refusal: fmt.Errorf("%w: grant the relay DESCRIBE and WRITE on topic %q and retry the row", d.Err, name)}
		default:
			return fmt.Errorf("ask Kafka for topic %q: %w", name, d.Err)
		}
	}
	sizes, _ := limits.RecordBytes(ctx, client, existing...) // after an error the default limit counts
	for name, bytes := range sizes {
		found[name] = topicState{exists: true, maxBytes: bytes}
	}
	return t.store(found)
}

func (t *topics) store(found map[string]topicState) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	var changed error
	for name, s := range found {
		if old, ok := t.known[name]; ok && old.exists && s.exists && old.maxBytes != s.maxBytes {
			changed = errLimitsChanged
		}
		s.asked = time.Now()
		t.known[name] = s
	}
	return changed
}

// transactionTimeout is how long the transaction of a relay that died holds up readers, if nobody publishes the shard.
const transactionTimeout = 30 * time.Second

// newClient makes a producer with what correctness needs after, and so above, what the caller set:
// idempotent, acks=all, no give-up after retries or time, and no going on after lost sequence numbers.
func (r *Relay) newClient(l *lease, t *topics) (*kgo.Client, error) {
	opts := []kgo.Opt{
		kgo.ProducerLinger(0), // the page is the batch
		kgo.SoftwareNameAndVersion("effectonce-relay", "v1"),
	}
	opts = append(opts, r.kafka...)
	opts = append(opts,
		kgo.RequiredAcks(kgo.AllISRAcks()),
		kgo.RecordRetries(1<<31-1),
		kgo.RecordDeliveryTimeout(0),
		kgo.StopProducerOnDataLossDetected(),
		// The relay bounds what is in flight by itself, in bytes.
		kgo.MaxBufferedRecords(1<<31-1),
		kgo.MaxBufferedBytes(0),
	)
	if t != nil {
		opts = append(opts, kgo.ProducerBatchMaxBytesFn(t.maxBytes))
	}
	if l != nil && r.cfg.ExactlyOnce {
		opts = append(opts, kgo.TransactionalID(r.transactionalID(l)), kgo.TransactionTimeout(transactionTimeout))
	}
	client, err := kgo.NewClient(opts...)
	if err != nil {
		return nil, fmt.Errorf("kafka options: %w", err)
	}
	if disabled, ok := client.OptValue(kgo.DisableIdempotentWrite).(bool); ok && disabled {
		client.Close()
		return nil, errors.New("kafka options: DisableIdempotentWrite would lose the order of rows and duplicate them: remove it")
	}
	if id, ok := client.OptValue(kgo.TransactionalID).(string); ok && id != "" && l == nil {
		client.Close()
		return nil, errors.New("kafka options: TransactionalID is not for the relay to borrow: remove it")
	}
	return client, nil
}
