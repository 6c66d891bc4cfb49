package relay

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/record"
)

const (
	// limitsAskMax bounds the request for limits, which the rows of all topics wait for: the relay
	// also works without an answer.
	limitsAskMax = 5 * time.Second
	// unclearMax is how long all rows wait for a new topic that Kafka cannot describe yet, mostly
	// one that is being created. After that only the rows of that topic wait.
	unclearMax = 2 * time.Second
)

// ask requests information about topics from the brokers. It waits while no broker answers. A
// refusal, or an unclear answer, concerns one topic and stops no other.
func (t *topics) ask(ctx context.Context, client *kgo.Client, names []string) (map[string]topicState, error) {
	found := make(map[string]topicState, len(names))
	left, begun := names, time.Now()
	for wait := 20 * time.Millisecond; ; wait *= 2 {
		answers, err := askMetadata(ctx, client, left)
		if err != nil {
			return nil, fmt.Errorf("ask Kafka for topics %q: %w", left, err)
		}
		var unclear []string
		for _, name := range left {
			s, again := t.state(name, answers[name])
			if found[name] = s; again && t.isNew(name) {
				unclear = append(unclear, name)
			}
		}
		left = unclear
		if len(left) == 0 || time.Since(begun)+wait > unclearMax || !pause.For(ctx, wait) {
			break
		}
	}
	t.askLimits(ctx, client, found)
	return found, nil
}

func (t *topics) isNew(name string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, met := t.known[name]
	return !met
}

// askMetadata sends one request. Listing with the administrative client would fail as a whole for
// one topic that is not allowed.
func askMetadata(ctx context.Context, client *kgo.Client, names []string) (map[string]*kmsg.MetadataResponseTopic, error) {
	request := kmsg.NewPtrMetadataRequest()
	request.IncludeTopicAuthorizedOperations = true
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

// state interprets an answer. unclear: Kafka cannot say now, and may soon.
func (t *topics) state(name string, answer *kmsg.MetadataResponseTopic) (s topicState, unclear bool) {
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
		s.reason, s.err = ReasonUnknownTopic, fmt.Errorf("topic %q does not exist: create it, and the row is published automatically", name)
	default:
		if known, _ := t.get(name); known.reason == "" && !t.isNew(name) {
			known.fresh = limitRetry // the client has its partitions
			return known, true
		}
		// In outbox_dead the rows keep their order and are published automatically. In the client
		// they would fill the in-flight limit, and every topic would wait.
		s.reason, s.err = ReasonUnknownTopic, fmt.Errorf("the brokers cannot say now whether topic %q exists: the row is published automatically when it does: %w", name, err)
		unclear = true
	}
	return s, unclear
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
	return !t.memory.refusedLately(name)
}

// askLimits requests the record size limits of the topics that the relay can write to. Without an
// answer the last one counts.
func (t *topics) askLimits(ctx context.Context, client *kgo.Client, found map[string]topicState) {
	var names []string
	for name, s := range found {
		if s.reason == "" {
			names = append(names, name)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, limitsAskMax)
	defer cancel()
	for name, answer := range record.Limits(ctx, client, names...) {
		s := found[name]
		s.maxBytes, s.fresh = t.memory.learned(name, answer)
		found[name] = s
	}
}
