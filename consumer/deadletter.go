package consumer

import (
	"context"
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/internal/pgerr"
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

// letter is a dead letter of a round trip.
type letter struct {
	*parkedMessage

	upTo int // statements, up to its last one
}

// letter returns the dead letter that the server refused; nil: something else failed.
func (r round) letter(f *failure) *letter {
	if r.done < r.published || pgerr.Unavailable(f.err) {
		return nil
	}
	for i := range r.letters {
		if r.done < r.letters[i].upTo {
			return &r.letters[i]
		}
	}
	return nil
}

// keep returns why a message is parked that cannot be a dead letter.
func (p *parkedMessage) keep(err error) *parking {
	why := *p.why
	why.kept, why.err = true, fmt.Errorf("it cannot be a dead letter (%.300s): %w", err.Error(), why.err)
	return &why
}

// queueFailures adds the statements for messages that were not handled. It returns those that become
// dead letters, or the one that the outbox refuses, because Kafka would.
func (c *Consumer) queueFailures(ctx context.Context, batch *pgx.Batch, w *work, s *selection) (letters []letter, f *failure) {
	rows := append(w.rows(s.handle), w.rows(s.skip)...)
	for i := range s.parked {
		p := &s.parked[i]
		if p.letter = false; !c.becomesLetter(p.why) {
			continue
		}
		if err := c.outbox.Queue(ctx, batch, c.deadLetter(p.Message, p.why)); err != nil {
			return nil, &failure{origin: originHandler, letter: &letter{p, 0}, err: err}
		}
		p.letter = true
		letters, rows = append(letters, letter{p, batch.Len()}), append(rows, p.row)
	}
	c.queuePark(batch, w.consumer, s)
	if w.released() {
		batch.Queue(c.sql[unparkSQL], rows) // a trigger promotes the next message of each key: see parked_promote
	}
	return letters, nil
}

func (c *Consumer) deadLetter(msg *Message, why *parking) outbox.Message {
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
	text(letterGroup, c.cfg.Group)
	text(letterClass, "effectonce."+why.reason)
	message, stack, _ := strings.Cut(bounds.ErrorText(why.err), "\n")
	text(letterMessage, message)
	text(letterStack, stack)
	text(letterID, msg.ID.String())
	text(letterAttempts, fmt.Sprint(why.attempts))
	return outbox.Message{ID: msg.PublishID("dead-letter"), Topic: c.cfg.DeadLetterTopic, Key: msg.Key, Payload: msg.Value, Headers: headers}
}
