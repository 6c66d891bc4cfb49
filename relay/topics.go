package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkaclient"
	"github.com/effectonce/effectonce/internal/record"
	"github.com/effectonce/effectonce/outbox"
)

// topics is what the work on one shard knows about topics: which of them it can write to, and how
// large their records may be. So a row that Kafka would refuse is recognized before it is produced.
// A refusal afterwards would arrive when later rows of its key are in flight.
type topics struct {
	memory *topicMemory
	most   int32 // bytes of the largest record that the client can write

	mu    sync.Mutex
	known map[string]topicState
	// given is the batch size of a topic that the client was given. The client requests it once,
	// when it first meets the topic. If that size is no longer right, the work starts over with a
	// new client.
	given map[string]int32
	// blocked are the topics in Kafka that rows of a topic in the outbox wait for.
	blocked map[string]map[string]bool
	tried   map[string]bool // see released
}

// topicState is the answer about one topic.
type topicState struct {
	reason   Reason // why its rows wait; empty: the relay can write to the topic
	err      error  // the reason as an error text
	maxBytes int32  // limit of a record; 0: not known, and Kafka decides
	parts    int32  // how many partitions it has; 0: not known
	asked    time.Time
	fresh    time.Duration // how long the answer is valid
}

const (
	// topicMaxAge is how long an answer is valid. Topics that rows wait for are requested again at
	// each poll of dead rows.
	topicMaxAge = time.Minute
	// limitRetry is the pause before a request for limits that got no answer is repeated.
	limitRetry = 5 * time.Second
	// partsAskMin bounds how often rows that request a missing partition make the relay ask Kafka
	// again.
	partsAskMin = 100 * time.Millisecond
)

func newTopics(r *Relay) *topics {
	t := &topics{memory: &r.topicMemory, most: record.BytesMax, known: map[string]topicState{}, given: map[string]int32{}}
	if r.cfg.Sink != nil {
		t.most = math.MaxInt32
	}
	return t
}

func (t *topics) get(name string) (topicState, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s, ok := t.known[name]
	return s, ok && time.Since(s.asked) < s.fresh
}

// older reports whether the last answer about a topic is older than d.
func (t *topics) older(name string, d time.Duration) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return time.Since(t.known[name].asked) > d
}

// ready reports whether the rows of a topic need not wait.
func (t *topics) ready(name string) bool {
	s, ok := t.get(name)
	return ok && s.reason == ""
}

// blocks notes that a row of a topic in the outbox waits for a topic in Kafka. The row must already
// be in outbox_dead. Otherwise a poll that found the topic ready in between would remove the note
// and not see the row.
func (t *topics) blocks(d deadRow) {
	if d.waitsFor == "" {
		return
	}
	topic, name := d.row.topic, d.waitsFor
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.blocked == nil {
		t.blocked = map[string]map[string]bool{}
	}
	if t.blocked[topic] == nil {
		t.blocked[topic] = map[string]bool{}
	}
	t.blocked[topic][name] = true
}

// released reports whether rows of a topic in the outbox that waited may be tried. names are the
// topics in Kafka that they are known to wait for. If Config.Topic chooses, rows that waited before
// this work began are tried once: it is not known which topics they wait for.
func (t *topics) released(topic string, names []string, chosen bool) bool {
	ready := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return !t.ready(name) })
	if !chosen {
		return len(ready) > 0
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	released := !t.tried[topic] || len(ready) > 0
	if t.tried == nil {
		t.tried = map[string]bool{}
	}
	t.tried[topic] = true
	for _, name := range ready {
		delete(t.blocked[topic], name)
	}
	return released
}

// blockedOn returns the topics in Kafka of blocks.
func (t *topics) blockedOn(topic string) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Keys(t.blocked[topic]))
}

// judge returns why a record of this size cannot be produced now. If the limit is unknown, Kafka
// decides; such a record may need a client that writes larger batches: see stale.
func (t *topics) judge(name string, bytes int) (Reason, error) {
	s, _ := t.get(name)
	switch {
	case s.reason != "":
		return s.reason, s.err
	case s.maxBytes > 0 && bytes > int(s.maxBytes):
		return ReasonTooLarge, fmt.Errorf("the record has %d bytes, max.message.bytes of topic %q is %d: raise it and retry the row, or discard the row", bytes, name, s.maxBytes)
	case bytes > int(t.most):
		return ReasonTooLarge, fmt.Errorf("the record has %d bytes, and the relay writes at most %d in one request: store the body elsewhere and publish a reference, and discard the row", bytes, t.most)
	case s.maxBytes == 0:
		t.memory.widen(name, int32(bytes))
	}
	return "", nil
}

// errLimitsChanged requests a new client: batch sizes are fixed when a client first meets a topic.
var errLimitsChanged = errors.New("the maximum record size of a topic changed: starting over with a new client")

// batchBytes is called by the client when it first produces to a topic: a batch must not be larger
// than a single record may be.
func (t *topics) batchBytes(name string) int32 {
	n := min(t.memory.batchBytes(name), t.most)
	if name == "" { // the client checks its options
		return n
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	// The client calls it again with each metadata update, which changes nothing about its known
	// partitions.
	if given, told := t.given[name]; told {
		return given
	}
	t.given[name] = n
	return n
}

// stale returns errLimitsChanged if the client was given another batch size of a topic than the one
// that is right now. It runs after the rows of a page were judged, and before they are produced.
func (t *topics) stale() error {
	if !t.memory.changed() {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for name, given := range t.given {
		if given != min(t.memory.batchBytes(name), t.most) {
			return errLimitsChanged
		}
	}
	return nil
}

// note records why the brokers refused a record that was alone in its batch, or a whole batch. It
// returns the reason for which the row is dead, if it was alone. The reason is empty if the row is
// not the cause; then the work starts over.
func (t *topics) note(name string, err error, alone bool) Reason {
	reason := reasonOf(err)
	if reason == ReasonNotAuthorized {
		t.memory.refuse(name)
		return ""
	}
	if reason == ReasonTooLarge && alone {
		t.memory.narrow(name)
	}
	return reason
}

// reasonOf returns the reason for which a row is dead whose record the brokers refused with err, or
// an empty reason if nothing is final. Failures of the brokers, the connection or the transaction,
// even those that the client does not retry, are temporary, or an operator fixes them at their
// source. They would make every row dead that is read in that time. An unknown error counts as such
// a failure: the relay reports it, and waits. So does a topic that does not exist: a new metadata
// request decides.
func reasonOf(err error) Reason {
	var kafka *kerr.Error
	if !errors.As(err, &kafka) {
		return ""
	}
	switch kafka.Code {
	case kerr.TopicAuthorizationFailed.Code:
		return ReasonNotAuthorized
	case kerr.MessageTooLarge.Code:
		return ReasonTooLarge
	case kerr.RecordListTooLarge.Code, kerr.InvalidRecord.Code, kerr.PolicyViolation.Code, kerr.InvalidTopicException.Code:
		return ReasonRefused
	}
	return ""
}

// note is topics.note. Where the brokers refuse compressed batches, the next client does not compress.
func (p *publisher) note(name string, err error, alone bool) Reason {
	if errors.Is(err, kerr.UnsupportedForMessageFormat) || errors.Is(err, kerr.UnsupportedCompressionType) {
		if !p.topicMemory.uncompressed.Swap(true) {
			p.cfg.Logger.Warn("the brokers refuse compressed batches: the relay sends uncompressed from now on; set Config.Compression (--kafka-compression) to none",
				"relay", p.cfg.Name, "topic", name, "error", err)
		}
	}
	return p.topics.note(name, err, alone)
}

// offers returns why a topic does not have a partition. Partitions are added, so an old answer must
// not make a row dead.
func (p *publisher) offers(ctx context.Context, name string, partition int32) error {
	s, _ := p.topics.get(name)
	if s.parts == 0 || partition < s.parts {
		return nil
	}
	if time.Since(s.asked) > partsAskMin {
		if err := p.learn(ctx, []string{name}); err != nil {
			return nil //nolint:nilerr // the brokers are unavailable: the client does not take the record, and the work starts over
		}
		s, _ = p.topics.get(name)
	}
	if s.parts == 0 || partition < s.parts {
		return nil
	}
	return fmt.Errorf("the row requests partition %d, and topic %q has %d: add partitions and retry the row, or correct its header %q in outbox_dead", partition, name, s.parts, outbox.HeaderPartition)
}

// learn requests information about topics. A sink instead refuses rows when they are handed to it.
func (p *publisher) learn(ctx context.Context, names []string) error {
	ctx, cancel := p.asking(ctx)
	defer cancel()
	return p.learnNow(ctx, names)
}

// learnNow is learn with the caller's limit.
func (p *publisher) learnNow(ctx context.Context, names []string) error {
	if p.cfg.Sink == nil {
		found, err := p.topics.ask(ctx, p.client, names)
		if err != nil {
			return fromOutlet(err)
		}
		p.topics.store(ctx, p.cfg.Logger, p.cfg.Name, found)
		return nil
	}
	found := map[string]topicState{}
	for _, name := range names {
		found[name] = topicState{maxBytes: math.MaxInt32, fresh: topicMaxAge}
	}
	p.topics.store(ctx, p.cfg.Logger, p.cfg.Name, found)
	return nil
}

func (t *topics) store(ctx context.Context, logger *slog.Logger, relay string, found map[string]topicState) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name, s := range found {
		s.asked = time.Now()
		t.known[name] = s
		t.memory.tell(ctx, logger, relay, name, s)
	}
}

// transactionTimeout is how long the open transaction of a relay that died delays readers, if no
// other replica publishes the shard.
const transactionTimeout = 30 * time.Second

// newClient makes a producer. The options that correctness needs come after the caller's options,
// and so override them: idempotent, acks=all, no limit of retries or time, and no continuing after
// lost sequence numbers.
func (r *Relay) newClient(l *lease, t *topics, more ...kgo.Opt) (*kgo.Client, error) {
	opts := []kgo.Opt{
		kgo.ProducerLinger(0), // the page is the batch
		// A topic that was deleted must not fill the flight for long: the client finds out by the
		// fifth answer in a row.
		kgo.MetadataMinAge(500 * time.Millisecond),
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
	if codec, ok := codecs[r.cfg.Compression]; ok {
		opts = append(opts, kgo.ProducerBatchCompression(codec, kgo.NoCompression()))
	}
	if r.topicMemory.uncompressed.Load() {
		opts = append(opts, kgo.ProducerBatchCompression(kgo.NoCompression()))
	}
	if t != nil {
		opts = append(opts, kgo.ProducerBatchMaxBytesFn(t.batchBytes))
	}
	if r.placing != nil {
		opts = append(opts, r.placing)
	}
	if l != nil && r.cfg.ExactlyOnce {
		opts = append(opts, kgo.TransactionalID(r.transactionalID(l)), kgo.TransactionTimeout(transactionTimeout))
	}
	client, err := kafkaclient.New(append(opts, more...)...)
	if err != nil {
		return nil, fmt.Errorf("kafka options: %w", err)
	}
	for problem, option := range map[string]any{
		"DisableIdempotentWrite would lose the order of rows and duplicate them: remove it": client.OptValue(kgo.DisableIdempotentWrite),
		"ManualFlushing would keep all rows in the client: remove it":                       client.OptValue(kgo.ManualFlushing),
	} {
		if set, ok := option.(bool); ok && set {
			client.Close()
			return nil, errors.New("kafka options: " + problem)
		}
	}
	if id, ok := client.OptValue(kgo.TransactionalID).(string); ok && id != "" && l == nil {
		client.Close()
		return nil, errors.New("kafka options: TransactionalID is not allowed: remove it")
	}
	if write, ok := client.OptValue(kgo.BrokerMaxWriteBytes).(int32); ok && t != nil {
		t.most = min(t.most, write-requestOverheadBytes)
	}
	return client, nil
}

// requestOverheadBytes bounds the bytes of a request in addition to a batch: its header and the
// name of the topic.
const requestOverheadBytes = 1024
