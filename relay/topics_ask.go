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

	"github.com/effectonce/effectonce/internal/limits"
)

const (
	// limitsAskMax bounds the question about limits, which the rows of all topics wait for: there is a way without an answer.
	limitsAskMax = 5 * time.Second
	// unclearMax is how long all rows wait for a topic that the relay meets and that Kafka cannot speak about yet: mostly
	// one that is being created. After it the rows of that topic alone wait.
	unclearMax = 2 * time.Second
)

// ask asks the brokers about topics. It waits while no broker answers. What they refuse, or cannot say, is about one
// topic and stops no other.
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
			s, again := t.state(ctx, client, name, answers[name])
			if found[name] = s; again && t.isNew(name) {
				unclear = append(unclear, name)
			}
		}
		left = unclear
		if len(left) == 0 || time.Since(begun)+wait > unclearMax || !pause(ctx, wait) {
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

// askMetadata is one request. Listing by the administrative client would fail as a whole for one topic that is not allowed.
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

// state is what an answer says. unclear: Kafka cannot say now, and may in a moment.
func (t *topics) state(ctx context.Context, client *kgo.Client, name string, answer *kmsg.MetadataResponseTopic) (s topicState, unclear bool) {
	s = topicState{fresh: topicMaxAge}
	var err error = kerr.UnknownTopicOrPartition
	if answer != nil {
		err = kerr.ErrorForCode(answer.ErrorCode)
	}
	switch {
	case err == nil && t.mayWrite(ctx, client, name, answer):
		s.parts = int32(len(answer.Partitions))
	case err == nil:
		s.reason, s.err = ReasonNotAuthorized, fmt.Errorf("the brokers do not let the relay write to topic %q: grant it WRITE, and the row is published by itself", name)
	case errors.Is(err, kerr.TopicAuthorizationFailed):
		s.reason, s.err = ReasonNotAuthorized, fmt.Errorf("%w: grant the relay DESCRIBE and WRITE on topic %q, and the row is published by itself", err, name)
	case errors.Is(err, kerr.UnknownTopicOrPartition), errors.Is(err, kerr.UnknownTopicID), errors.Is(err, kerr.InvalidTopicException):
		s.reason, s.err = ReasonUnknownTopic, fmt.Errorf("topic %q does not exist: create it, and the row is published by itself", name)
	default:
		if known, _ := t.get(name); known.reason == "" && !t.isNew(name) {
			known.fresh = limitRetryMin // the client has its partitions
			return known, true
		}
		// In outbox_dead the rows keep their order and are published by themselves; with the client they would fill what is
		// in flight, and every topic would wait.
		s.reason, s.err = ReasonUnknownTopic, fmt.Errorf("the brokers cannot say now whether topic %q exists: the row is published by itself when it does: %w", name, err)
		unclear = true
	}
	return s, unclear
}

// operations are bits of the answer about rights.
const (
	mayDescribe = 1 << kmsg.ACLOperationDescribe
	mayWrite    = 1 << kmsg.ACLOperationWrite
)

// mayWrite judges by what the brokers say about the relay's rights. Where they say nothing (before Kafka 2.3, and some
// services in its place) it is whether they refused a record, until a request without any is let through.
func (t *topics) mayWrite(ctx context.Context, client *kgo.Client, name string, answer *kmsg.MetadataResponseTopic) bool {
	rights := answer.AuthorizedOperations
	said := rights != math.MinInt32 && rights&mayDescribe != 0
	if said && rights&mayWrite == 0 {
		return false
	}
	refused, due := t.memory.refusal(name)
	switch {
	case !refused:
		return true
	case !due:
		return false
	case !said && writeRefused(ctx, client, answer):
		t.memory.refuse(name)
		return false
	}
	t.memory.admit(name)
	return true
}

// writeRefused tries to write nothing: brokers look at the right to write before they look at what is written, and then
// refuse a request without records. Only the first of these answers is certain. Behind any other the rows are tried:
// should they be refused, they wait again.
func writeRefused(ctx context.Context, client *kgo.Client, answer *kmsg.MetadataResponseTopic) bool {
	if len(answer.Partitions) == 0 {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, limitsAskMax)
	defer cancel()
	partition := kmsg.NewProduceRequestTopicPartition()
	partition.Partition, partition.Records = answer.Partitions[0].Partition, []byte{}
	topic := kmsg.NewProduceRequestTopic()
	topic.Topic, topic.TopicID, topic.Partitions = *answer.Topic, answer.TopicID, []kmsg.ProduceRequestTopicPartition{partition}
	request := kmsg.NewPtrProduceRequest()
	request.Acks, request.TimeoutMillis, request.Topics = -1, int32(limitsAskMax.Milliseconds()), []kmsg.ProduceRequestTopic{topic}
	response, err := client.Broker(int(answer.Partitions[0].Leader)).RetriableRequest(ctx, request)
	if err != nil {
		return false
	}
	for _, topic := range response.(*kmsg.ProduceResponse).Topics { //nolint:forcetypeassert // the answer to that request
		for _, p := range topic.Partitions {
			if p.ErrorCode == kerr.TopicAuthorizationFailed.Code {
				return true
			}
		}
	}
	return false
}

// askLimits asks how large the records of topics may be that can be written to. Without an answer the last one counts.
func (t *topics) askLimits(ctx context.Context, client *kgo.Client, found map[string]topicState) {
	var names []string
	for name, s := range found {
		if s.reason == "" {
			names = append(names, name)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, limitsAskMax)
	defer cancel()
	for name, answer := range limits.RecordBytes(ctx, client, names...) {
		s := found[name]
		s.maxBytes, s.fresh = t.memory.learned(name, answer)
		found[name] = s
	}
}
