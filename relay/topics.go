package relay

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/outbox"
)

// topics is what the work on one shard knows about topics: which of them it can write to. So a row of
// another one is recognized before it is produced. A refusal afterwards would arrive when later rows of
// its key are in flight.
type topics struct {
	*Relay

	mu    sync.Mutex
	known map[string]topicState
	given map[string]int32 // batch sizes of the client: see batchBytes
}

// topicState is the answer about one topic.
type topicState struct {
	reason Reason // why its rows wait; empty: the relay can write to the topic
	err    error  // the reason as an error text
	parts  int32  // how many partitions it has; 0: not known
	asked  time.Time
	fresh  time.Duration // how long the answer is valid
}

const (
	// topicMaxAge is how long an answer is valid. Topics that rows wait for are requested again at
	// each poll of dead rows.
	topicMaxAge = time.Minute
	// missingAge is the same of a topic that cannot be used.
	missingAge = time.Second
	// unclearAge is the same of an answer that says nothing about a topic that was known.
	unclearAge = 5 * time.Second
	// partsAskMin bounds how often rows that request a missing partition make the relay ask Kafka
	// again.
	partsAskMin = 100 * time.Millisecond
	// writeRetryEvery is how often writing is tried to a topic that brokers refused to write to,
	// although they do not report that in the topic's rights.
	writeRetryEvery = 10 * time.Second
)

// get returns the last answer about a topic, and whether it is still valid.
func (t *topics) get(name string) (s topicState, fresh bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s = t.known[name]
	return s, time.Since(s.asked) < s.fresh
}

// judge returns why a record of this size cannot be produced now.
func (t *topics) judge(name string, bytes int) (Reason, error) {
	s, _ := t.get(name)
	if s.reason == "" && bytes > t.cfg.RecordBytesMax {
		return ReasonTooLarge, fmt.Errorf("the record has %d bytes, Config.RecordBytesMax of the relay (--record-bytes-max) is %d: raise it, and max.message.bytes of topic %q, and retry the row; or discard the row", bytes, t.cfg.RecordBytesMax, name)
	}
	return s.reason, s.err
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
	case kerr.MessageTooLarge.Code:
		return ReasonTooLarge
	case kerr.RecordListTooLarge.Code, kerr.InvalidRecord.Code, kerr.PolicyViolation.Code, kerr.InvalidTopicException.Code:
		return ReasonRefused
	}
	return ""
}

// note records what a refusal says about a topic or about all of them, for the next client, and returns
// reasonOf.
func (p *publisher) note(name string, err error) Reason {
	switch {
	case errors.Is(err, kerr.TopicAuthorizationFailed):
		p.refusedWrites.Store(name, time.Now())
	case errors.Is(err, kerr.UnsupportedForMessageFormat), errors.Is(err, kerr.UnsupportedCompressionType):
		if !p.uncompressed.Swap(true) {
			p.cfg.Logger.Warn("the brokers refuse compressed batches: the relay sends uncompressed from now on; set Config.Compression (--kafka-compression) to none",
				"relay", p.cfg.Name, "topic", name, "error", err)
		}
	}
	return reasonOf(err)
}

// learn requests information about topics.
func (p *publisher) learn(ctx context.Context, names []string) error {
	ctx, cancel := p.asking(ctx)
	defer cancel()
	return p.learnNow(ctx, names)
}

// learnNow is learn with the caller's limit. A sink instead refuses rows when they are handed to it.
func (p *publisher) learnNow(ctx context.Context, names []string) error {
	if p.cfg.Sink != nil {
		return nil
	}
	answers, err := askMetadata(ctx, p.client, names)
	if err != nil {
		return fromOutlet(fmt.Errorf("ask Kafka for topics %q: %w", names, err))
	}
	for _, name := range names {
		s := p.topics.learned(name, answers[name])
		const text = "Kafka does not let the relay use a topic: its rows wait in outbox_dead and are published automatically when the right is granted"
		switch { //nolint:staticcheck // a switch of s.reason would have to name all reasons
		case s.reason == ReasonNotAuthorized:
			p.say.about(ctx, name, text, "relay", p.cfg.Name, "topic", name, "error", s.err)
		case s.reason == "":
			p.say.over(ctx, text+"\x00"+name, "Kafka lets the relay use the topic again", "relay", p.cfg.Name, "topic", name)
		}
	}
	return nil
}

// askMetadata sends one request. Listing with the administrative client would fail as a whole for
// one topic that is not allowed.
func askMetadata(ctx context.Context, client *kgo.Client, names []string) (map[string]*kmsg.MetadataResponseTopic, error) {
	request := kmsg.NewPtrMetadataRequest()
	request.IncludeTopicAuthorizedOperations = true
	request.AllowAutoTopicCreation, _ = client.OptValue(kgo.AllowAutoTopicCreation).(bool)
	for _, name := range names {
		topic := kmsg.NewMetadataRequestTopic()
		topic.Topic = kmsg.StringPtr(name)
		request.Topics = append(request.Topics, topic)
	}
	response, err := request.RequestWith(ctx, client)
	if err != nil {
		return nil, err
	}
	found := make(map[string]*kmsg.MetadataResponseTopic, len(response.Topics))
	for i := range response.Topics {
		if answer := &response.Topics[i]; answer.Topic != nil {
			found[*answer.Topic] = answer
		}
	}
	return found, nil
}

// learned interprets an answer, and remembers it.
func (t *topics) learned(name string, answer *kmsg.MetadataResponseTopic) (s topicState) {
	t.mu.Lock()
	defer t.mu.Unlock()
	defer func() { s.asked = time.Now(); t.known[name] = s }()
	s = topicState{fresh: topicMaxAge}
	var err error = kerr.UnknownTopicOrPartition
	if answer != nil {
		err = kerr.ErrorForCode(answer.ErrorCode)
	}
	switch {
	case err == nil && t.mayWrite(name, answer):
		s.parts = int32(len(answer.Partitions))
	case err == nil:
		s.reason, s.err = ReasonNotAuthorized, fmt.Errorf("the brokers do not let the relay write to topic %q: grant it WRITE, and the row is published automatically", name)
	case errors.Is(err, kerr.TopicAuthorizationFailed):
		s.reason, s.err = ReasonNotAuthorized, fmt.Errorf("%w: grant the relay DESCRIBE and WRITE on topic %q, and the row is published automatically", err, name)
	case errors.Is(err, kerr.UnknownTopicOrPartition), errors.Is(err, kerr.UnknownTopicID), errors.Is(err, kerr.InvalidTopicException):
		s.reason, s.err = ReasonUnknownTopic, fmt.Errorf("topic %q does not exist: create it, and the row is published automatically (brokers create no topic by themselves for the relay, unless its options have kgo.AllowAutoTopicCreation)", name)
	default:
		if known, met := t.known[name]; met && known.reason == "" {
			known.fresh = unclearAge // the client has its partitions
			return known
		}
		// In outbox_dead the rows keep their order and are published automatically. In the client
		// they would fill the in-flight limit, and every topic would wait.
		s.reason, s.err = ReasonUnknownTopic, fmt.Errorf("the brokers cannot say now whether topic %q exists: the row is published automatically when it does: %w", name, err)
	}
	if s.reason != "" {
		s.fresh = missingAge
	}
	return s
}

// The bits of authorized operations in a metadata answer.
const (
	mayDescribe = 1 << kmsg.ACLOperationDescribe
	mayWrite    = 1 << kmsg.ACLOperationWrite
)

// mayWrite uses the rights that the brokers report. If they report none (before Kafka 2.3, and some
// compatible services), it uses whether they refused a record lately; then its rows are tried again.
func (t *topics) mayWrite(name string, answer *kmsg.MetadataResponseTopic) bool {
	rights := answer.AuthorizedOperations
	if rights != math.MinInt32 && rights&mayDescribe != 0 && rights&mayWrite == 0 {
		return false
	}
	at, refused := t.refusedWrites.Load(name)
	return !refused || time.Since(at.(time.Time)) > writeRetryEvery
}
