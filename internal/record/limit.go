package record

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

const (
	// BytesDefault is Kafka's default of max.message.bytes.
	BytesDefault = 1_048_588
	// BytesMax stays below what the client writes in one request.
	BytesMax = 90_000_000
)

const setting = "max.message.bytes"

// Limit is the limit of one topic.
type Limit struct {
	// Bytes is the topic's max.message.bytes, at most BytesMax. 0: unknown, see Err.
	Bytes int32
	// Err is why Bytes is unknown: the cause is in this topic alone, or in the request.
	Err error
}

// Withheld reports whether the brokers answer without the limit, usually because the right
// DESCRIBE_CONFIGS is missing. Retrying soon does not help.
func (l Limit) Withheld() bool {
	return errors.Is(l.Err, kerr.TopicAuthorizationFailed) || errors.Is(l.Err, kerr.ClusterAuthorizationFailed) || errors.Is(l.Err, errSilent)
}

// errSilent is for a broker that answers without the setting: some Kafka-compatible services do.
var errSilent = errors.New("the broker does not report " + setting)

// Limits reads max.message.bytes of topics that exist. The result has all of them.
func Limits(ctx context.Context, client *kgo.Client, topics ...string) map[string]Limit {
	found := make(map[string]Limit, len(topics))
	if len(topics) == 0 {
		return found
	}
	request := kmsg.NewPtrDescribeConfigsRequest()
	for _, topic := range topics {
		resource := kmsg.NewDescribeConfigsRequestResource()
		resource.ResourceType, resource.ResourceName, resource.ConfigNames = kmsg.ConfigResourceTypeTopic, topic, []string{setting}
		request.Resources = append(request.Resources, resource)
		found[topic] = Limit{Err: errSilent}
	}
	response, err := request.RequestWith(ctx, client)
	if err != nil {
		for _, topic := range topics {
			found[topic] = Limit{Err: fmt.Errorf("ask Kafka for the limits of topics: %w", err)}
		}
		return found
	}
	for _, resource := range response.Resources {
		if _, asked := found[resource.ResourceName]; asked {
			found[resource.ResourceName] = limitOf(&resource)
		}
	}
	return found
}

func limitOf(resource *kmsg.DescribeConfigsResponseResource) Limit {
	if err := kerr.ErrorForCode(resource.ErrorCode); err != nil {
		return Limit{Err: fmt.Errorf("ask Kafka for %s of topic %q: %w", setting, resource.ResourceName, err)}
	}
	for _, entry := range resource.Configs {
		if entry.Name != setting || entry.Value == nil {
			continue
		}
		if n, err := strconv.ParseInt(*entry.Value, 10, 32); err == nil && n > 0 {
			return Limit{Bytes: int32(min(n, BytesMax))}
		}
	}
	return Limit{Err: errSilent}
}
