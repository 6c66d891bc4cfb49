package checker

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
)

// event is the body of a record, as described in the demo's documentation.
type event struct {
	Order    *int64 `json:"order"`
	Customer string `json:"customer"`
	Version  int64  `json:"version"`
	Amount   int64  `json:"amount"`
}

// ReadTopic fills in the records of a topic, from its first offset to the end that it had when the
// call began. options have to reach the brokers (seeds, TLS, SASL) and must not name a consumer
// group.
func ReadTopic(ctx context.Context, options []kgo.Opt, topic string, evidence *Evidence) error {
	client, err := kgo.NewClient(options...)
	if err != nil {
		return fmt.Errorf("check topic %s: %w", topic, err)
	}
	defer client.Close()
	extents, err := topicscan.Extents(ctx, client, time.Time{}, topic)
	if err != nil {
		return fmt.Errorf("check topic %s: %w", topic, err)
	}
	if len(extents[topic]) == 0 {
		return fmt.Errorf("check topic %s: %w", topic, kerr.UnknownTopicOrPartition)
	}
	err = topicscan.Scan(ctx, options, extents, func(r *kgo.Record) error {
		evidence.Records = append(evidence.Records, decode(r))
		return nil
	})
	if err != nil {
		return fmt.Errorf("read topic %s: %w", topic, err)
	}
	return nil
}

func decode(r *kgo.Record) Record {
	record := Record{Partition: r.Partition, Offset: r.Offset, Key: string(r.Key)}
	for _, h := range r.Headers {
		if h.Key == "message-id" {
			record.MessageID = string(h.Value)
		}
	}
	var body event
	switch err := json.Unmarshal(r.Value, &body); {
	case err != nil:
		record.Unreadable = err.Error()
	case record.MessageID == "":
		record.Unreadable = "no header message-id"
	case body.Order == nil:
		record.Unreadable = "no order number"
	case body.Customer != record.Key:
		record.Unreadable = fmt.Sprintf("its key is %q, its customer is %q", record.Key, body.Customer)
	default:
		record.OrderID, record.Version, record.Amount = *body.Order, body.Version, body.Amount
	}
	return record
}
