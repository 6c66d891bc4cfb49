package consumer

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/dedup"
)

// Message is one Kafka record. Handlers must not change it.
type Message struct {
	// ID under which the message is claimed. See dedup.MessageID.
	ID        uuid.UUID
	Topic     string
	Partition int32
	Offset    int64
	// Key and Value keep the difference between nil (Kafka's null) and empty.
	Key, Value []byte
	Headers    []Header
	// Time is the record's timestamp.
	Time time.Time

	published int   // messages published while handling it: the step of the next child ID
	invalid   error // why it cannot be identified
}

// Header is one record header; the value of Kafka's null is nil.
type Header struct {
	Name  string
	Value []byte
}

// Header returns the value of the first header of a name.
func (m *Message) Header(name string) ([]byte, bool) {
	for _, h := range m.Headers {
		if h.Name == name {
			return h.Value, true
		}
	}
	return nil, false
}

// ChildID derives an ID from this message and a step: the same at every re-execution. Use it as the
// idempotency key of a call to another system; each call in a handler needs a step of its own.
func (m *Message) ChildID(step string) uuid.UUID { return dedup.ChildID(m.ID, step, m.Time) }

// String names the message for logs, without key or value.
func (m *Message) String() string {
	return fmt.Sprintf("message %s (topic %s, partition %d, offset %d)", m.ID, m.Topic, m.Partition, m.Offset)
}

// errAmbiguousID: two headers of one name with different values. Choosing one of them could drop a
// message as the duplicate of another.
var errAmbiguousID = errors.New("message carries two different values of an ID header: let its producer send one")

// newMessage reads a record. topicID is zero if the broker does not know topic IDs.
func (c *Consumer) newMessage(record *kgo.Record, topicID uuid.UUID) *Message {
	m := &Message{
		Topic: record.Topic, Partition: record.Partition, Offset: record.Offset,
		Key: record.Key, Value: record.Value, Time: record.Timestamp,
	}
	if len(record.Headers) > 0 {
		m.Headers = make([]Header, len(record.Headers))
		for i, h := range record.Headers {
			m.Headers[i] = Header{Name: h.Key, Value: h.Value}
		}
	}
	raw, err := c.rawID(m)
	if err != nil {
		m.invalid = Permanent(err)
	}
	if len(raw) > 0 {
		scope := m.Topic
		if source, ok := m.Header("ce_source"); ok && len(source) > 0 {
			scope = string(source)
		}
		m.ID = dedup.MessageID(scope, raw)
		return m
	}
	m.ID = coordinatesID(m, topicID)
	if c.cfg.Hooks.WithoutID != nil {
		c.cfg.Hooks.WithoutID(m)
	}
	c.warnWithoutID.Do(func() {
		c.cfg.Logger.Warn("messages without an ID are identified by topic, partition and offset: a duplicate that their producer sends is not recognised; said once",
			"group", c.cfg.Group, "topic", m.Topic, "partition", m.Partition, "offset", m.Offset, "id_headers", c.cfg.IDHeaders)
	})
	return m
}

// rawID finds the bytes that name the message. An empty value names nothing: all messages with one would
// be duplicates of each other.
func (c *Consumer) rawID(m *Message) ([]byte, error) {
	for _, name := range c.cfg.IDHeaders {
		var found []byte
		for _, h := range m.Headers {
			if h.Name != name || len(h.Value) == 0 {
				continue
			}
			if found != nil && !bytes.Equal(found, h.Value) {
				return nil, fmt.Errorf("%w (header %q)", errAmbiguousID, name)
			}
			found = h.Value
		}
		if found != nil {
			return found, nil
		}
	}
	if c.cfg.IDFunc != nil {
		return c.cfg.IDFunc(m), nil
	}
	return nil, nil
}

// coordinatesID stands for a message without an ID. The topic's own ID is part of it: a topic that was
// deleted and made anew counts its offsets from zero again.
func coordinatesID(m *Message, topicID uuid.UUID) uuid.UUID {
	raw := make([]byte, 0, 16+4+8+len(m.Topic))
	raw = append(raw, topicID[:]...)
	raw = binary.BigEndian.AppendUint32(raw, uint32(m.Partition))
	raw = binary.BigEndian.AppendUint64(raw, uint64(m.Offset))
	return dedup.MessageID("effectonce:coordinates:"+m.Topic, raw)
}
