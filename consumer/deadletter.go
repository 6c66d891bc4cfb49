package consumer

import (
	"context"
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/outbox"
)

// Names of the headers of a dead letter: those that Spring Kafka's DeadLetterPublishingRecoverer
// writes (org.springframework.kafka.support.KafkaHeaders), so that existing tools read them.
// Numbers are big-endian, as Java writes them.
const (
	letterTopic         = "kafka_dlt-original-topic"
	letterPartition     = "kafka_dlt-original-partition"      // int32
	letterOffset        = "kafka_dlt-original-offset"         // int64
	letterTimestamp     = "kafka_dlt-original-timestamp"      // int64, milliseconds
	letterTimestampType = "kafka_dlt-original-timestamp-type" // CreateTime or LogAppendTime
	letterGroup         = "kafka_dlt-original-consumer-group"
	letterClass         = "kafka_dlt-exception-fqcn" // here: the reason
	letterMessage       = "kafka_dlt-exception-message"
	letterStack         = "kafka_dlt-exception-stacktrace"
	// These are ours: Spring has no names for them.
	letterID       = "effectonce-original-message-id"
	letterAttempts = "effectonce-attempts"
	letterPrefix   = "kafka_dlt-"
)

// queueDeadLetters publishes the messages that are not handled, in the same transaction. It returns
// those that must be parked anyway: the outbox refuses them, because Kafka would.
func (e *engine) queueDeadLetters(ctx context.Context, batch *pgx.Batch, s *selection) *selection {
	left := &selection{}
	for i, msg := range s.parked {
		err := s.why[i].err
		if s.why[i].reason != reasonTooLarge {
			err = e.outbox.Queue(ctx, batch, e.deadLetter(msg, s.why[i]))
		}
		if err != nil {
			why := *s.why[i]
			why.err = fmt.Errorf("it cannot be a dead letter (%.300s): %w", err.Error(), why.err)
			if s.kept == nil {
				s.kept = map[*Message]bool{}
			}
			s.kept[msg] = true
			left.parked, left.why, left.behind = append(left.parked, msg), append(left.why, &why), append(left.behind, false)
		}
	}
	return left
}

func (e *engine) deadLetter(msg *Message, why *parking) outbox.Message {
	timestampType := "CreateTime"
	if msg.record != nil && msg.record.Attrs.TimestampType() == 1 {
		timestampType = "LogAppendTime"
	}
	headers := make([]outbox.Header, 0, len(msg.Headers)+11)
	for _, h := range msg.Headers {
		// A dead letter that fails again carries the headers of its last failure, and the relay
		// writes its own headers. Neither is copied.
		if h.Name != "" && h.Name != outbox.HeaderMessageID && h.Name != outbox.HeaderOccurredAt && h.Name != outbox.HeaderPartition && !strings.HasPrefix(h.Name, letterPrefix) &&
			h.Name != letterID && h.Name != letterAttempts {
			headers = append(headers, h)
		}
	}
	text := func(name, value string) { headers = append(headers, outbox.Header{Name: name, Value: []byte(value)}) }
	number := func(name string, value []byte) { headers = append(headers, outbox.Header{Name: name, Value: value}) }
	text(letterTopic, msg.Topic)
	number(letterPartition, binary.BigEndian.AppendUint32(nil, uint32(msg.Partition)))
	number(letterOffset, binary.BigEndian.AppendUint64(nil, uint64(msg.Offset)))
	number(letterTimestamp, binary.BigEndian.AppendUint64(nil, uint64(msg.Time.UnixMilli())))
	text(letterTimestampType, timestampType)
	text(letterGroup, e.cfg.Group)
	text(letterClass, "effectonce."+why.reason)
	message, stack, _ := strings.Cut(bounds.ErrorText(why.err), "\n")
	text(letterMessage, message)
	text(letterStack, stack)
	text(letterID, msg.ID.String())
	text(letterAttempts, fmt.Sprint(why.attempts))
	return outbox.Message{ID: msg.PublishID("dead-letter"), Topic: e.cfg.DeadLetterTopic, Key: msg.Key, Payload: msg.Value, Headers: headers}
}
