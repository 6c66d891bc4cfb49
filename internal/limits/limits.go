// Package limits knows how large the records of a topic may be. The relay and a replay send by it.
package limits

import (
	"context"
	"fmt"
	"strconv"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	// RecordBytesDefault is Kafka's max.message.bytes, for brokers that do not tell.
	RecordBytesDefault = 1_048_588
	// recordBytesMax stays below what the client writes in one request.
	recordBytesMax = 90_000_000
)

// RecordBytes asks for max.message.bytes of topics that exist. A topic whose configuration may not be described has the
// default, and so have all if there is an error.
func RecordBytes(ctx context.Context, client *kgo.Client, topics ...string) (map[string]int32, error) {
	found := make(map[string]int32, len(topics))
	for _, topic := range topics {
		found[topic] = RecordBytesDefault
	}
	if len(topics) == 0 {
		return found, nil
	}
	configs, err := kadm.NewClient(client).DescribeTopicConfigs(ctx, topics...)
	if err != nil {
		return found, fmt.Errorf("ask Kafka for the limits of topics %q: %w", topics, err)
	}
	for _, config := range configs {
		for _, entry := range config.Configs {
			if entry.Key != "max.message.bytes" || entry.Value == nil {
				continue
			}
			if n, err := strconv.ParseInt(*entry.Value, 10, 32); err == nil && n > 0 {
				found[config.Name] = int32(min(n, recordBytesMax))
			}
		}
	}
	return found, nil
}
