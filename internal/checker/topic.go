package checker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// event is the body of a record, as the demo's documentation describes it.
type event struct {
	Order    *int64 `json:"order"`
	Customer string `json:"customer"`
	Version  int64  `json:"version"`
	Amount   int64  `json:"amount"`
}

// ReadTopic fills in the records of a topic, from its first offset to the end that it had when the
// call began. options lead to the brokers (seeds, TLS, SASL); they must not name a consumer group.
func ReadTopic(ctx context.Context, options []kgo.Opt, topic string, evidence *Evidence) error {
	client, err := kgo.NewClient(options...)
	if err != nil {
		return fmt.Errorf("check topic %s: %w", topic, err)
	}
	defer client.Close()
	ends, err := endOffsets(ctx, client, topic)
	if err != nil {
		return fmt.Errorf("check topic %s: %w", topic, err)
	}
	reader, err := kgo.NewClient(append(options[:len(options):len(options)],
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: fromStart(ends)}),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		// With them every offset below the end is seen, and the loop below knows when it is there.
		kgo.KeepControlRecords(),
	)...)
	if err != nil {
		return fmt.Errorf("check topic %s: %w", topic, err)
	}
	defer reader.Close()
	for partition, end := range ends {
		if end == 0 {
			delete(ends, partition)
		}
	}
	for len(ends) > 0 {
		fetches := reader.PollFetches(ctx)
		if err := fetches.Err0(); err != nil {
			return fmt.Errorf("read topic %s, %d partitions are not read to their end: %w", topic, len(ends), err)
		}
		for _, failed := range fetches.Errors() {
			return fmt.Errorf("read topic %s, partition %d: %w", topic, failed.Partition, failed.Err)
		}
		fetches.EachRecord(func(r *kgo.Record) {
			end, reading := ends[r.Partition]
			if reading && r.Offset < end && !r.Attrs.IsControl() {
				evidence.Records = append(evidence.Records, decode(r))
			}
			if r.Offset+1 >= end {
				delete(ends, r.Partition)
			}
		})
	}
	return nil
}

func fromStart(ends map[int32]int64) map[int32]kgo.Offset {
	offsets := make(map[int32]kgo.Offset, len(ends))
	for partition := range ends {
		offsets[partition] = kgo.NewOffset().AtStart()
	}
	return offsets
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

// endOffsets asks for the offset after the last committed record of each partition.
func endOffsets(ctx context.Context, client *kgo.Client, topic string) (map[int32]int64, error) {
	metadata := kmsg.NewPtrMetadataRequest()
	wanted := kmsg.NewMetadataRequestTopic()
	wanted.Topic = kmsg.StringPtr(topic)
	metadata.Topics = append(metadata.Topics, wanted)
	described, err := metadata.RequestWith(ctx, client)
	if err != nil {
		return nil, fmt.Errorf("ask for its partitions: %w", err)
	}
	list := kmsg.NewPtrListOffsetsRequest()
	list.ReplicaID = -1
	list.IsolationLevel = 1 // read committed
	asked := kmsg.NewListOffsetsRequestTopic()
	asked.Topic = topic
	for _, t := range described.Topics {
		if err := kerr.ErrorForCode(t.ErrorCode); err != nil {
			return nil, err
		}
		for _, p := range t.Partitions {
			partition := kmsg.NewListOffsetsRequestTopicPartition()
			partition.Partition = p.Partition
			partition.Timestamp = -1 // the end
			asked.Partitions = append(asked.Partitions, partition)
		}
	}
	list.Topics = append(list.Topics, asked)
	ends := make(map[int32]int64, len(asked.Partitions))
	for _, shard := range client.RequestSharded(ctx, list) {
		if shard.Err != nil {
			return nil, fmt.Errorf("ask for its end: %w", shard.Err)
		}
		answer, ok := shard.Resp.(*kmsg.ListOffsetsResponse)
		if !ok {
			return nil, errors.New("ask for its end: the broker answered something else")
		}
		for _, t := range answer.Topics {
			for _, p := range t.Partitions {
				if err := kerr.ErrorForCode(p.ErrorCode); err != nil {
					return nil, fmt.Errorf("ask for the end of partition %d: %w", p.Partition, err)
				}
				ends[p.Partition] = p.Offset
			}
		}
	}
	if len(ends) != len(asked.Partitions) || len(ends) == 0 {
		return nil, fmt.Errorf("ask for its end: %d of %d partitions answered", len(ends), len(asked.Partitions))
	}
	return ends, nil
}
