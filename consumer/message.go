package consumer

import (
	"encoding/binary"
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
	// Time is the record's timestamp, cut to the years -4000 to 294000.
	Time time.Time

	topicID   uuid.UUID // zero if the broker does not know it
	record    *kgo.Record
	published int        // messages published while handling it: the step of the next child ID
	released  time.Time  // the time of its children, if it was parked
	scope     string     // the consumer's name
	callTime  *time.Time // the time in keys for foreign calls of the previous release; nil: they have none
	behind    int64      // offset behind the control records that follow it; 0: none do
	row       int64      // its seq in parked_messages; 0: it comes from Kafka
	park      *parking   // it is not handled but parked
	compared  bool       // its ID may be another message's: see dedup.IDSource
	attempts  int        // attempts at it alone, as the database knows them; 0: none
	place     int        // in the tracker
	counted   bool       // the next attempt is counted already
}

// Times that the database can store. A record's timestamp is its producer's: a partition must not stop at one.
//
//nolint:gochecknoglobals // constants
var (
	timeMin = time.Date(-4000, 1, 1, 0, 0, 0, 0, time.UTC)
	timeMax = time.Date(294000, 1, 1, 0, 0, 0, 0, time.UTC)
)

// recordTime is the timestamp of a record, cut to what the database can store.
func recordTime(record *kgo.Record) time.Time {
	switch at := record.Timestamp; {
	case at.Before(timeMin):
		return timeMin
	case at.After(timeMax):
		return timeMax
	default:
		return at
	}
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

// Record is the Kafka record of the message, as the client read it; nil where the message was parked and is handled
// again. It must not be changed.
func (m *Message) Record() *kgo.Record { return m.record }

// ChildID derives the key of a call to another system: it depends on the consumer's name, the message's ID and the
// step alone, so it is the same at every attempt, after parking, retry, promotion and release. Each call in a handler
// needs a step of its own. It carries no time: messages that a handler publishes have other IDs, see OutboxID.
//
// Messages that the previous release may have attempted keep the keys that it gave them.
func (m *Message) ChildID(step string) uuid.UUID {
	if m.callTime != nil {
		return dedup.ChildID(m.ID, step, *m.callTime)
	}
	return dedup.CallKey(m.scope, m.ID, step)
}

// OutboxID derives the ID of a message to be published from this one and a step: the same at every re-execution. It
// carries the time of the record, or of the release from parking, so that the next consumer can prove it fresh.
// What a handler publishes through its tx gets such an ID by itself; a handler of whole batches calls it.
func (m *Message) OutboxID(step string) uuid.UUID {
	at := m.Time
	if !m.released.IsZero() {
		at = m.released
	}
	return dedup.ChildID(m.ID, step, at)
}

// Generations of keys for foreign calls, as message_attempts and parked_messages store them.
const (
	keysTimed  = 1 // of the previous release
	keysStable = 2
)

func (m *Message) keyGeneration() int16 {
	if m.callTime != nil {
		return keysTimed
	}
	return keysStable
}

// keepKeys makes the message's keys for foreign calls those of a generation that an earlier attempt used.
func (m *Message) keepKeys(generation int16) {
	if generation == keysTimed && m.callTime == nil {
		m.callTime = &m.Time
	}
}

// next is the offset behind the message and the control records that follow it.
func (m *Message) next() int64 { return max(m.behind, m.Offset+1) }

// String names the message for logs, without key or value.
func (m *Message) String() string {
	return fmt.Sprintf("message %s (topic %s, partition %d, offset %d)", m.ID, m.Topic, m.Partition, m.Offset)
}

// headersMax bounds the headers of a message: they are looked through for each.
const headersMax = 1000

// newMessages reads records of the lane's partition, with one allocation for all messages and one for all
// headers. topicID is zero if the broker does not know topic IDs.
func (c *Consumer) newMessages(l *lane, records []*kgo.Record, topicID uuid.UUID) []*Message {
	n := 0
	for _, record := range records {
		n += len(record.Headers)
	}
	slab, headers, msgs := make([]Message, len(records)), make([]Header, 0, n), make([]*Message, len(records))
	for i, record := range records {
		m := &slab[i]
		*m = Message{
			Topic: record.Topic, Partition: record.Partition, Offset: record.Offset,
			Key: record.Key, Value: record.Value, Time: recordTime(record), topicID: topicID, record: record,
		}
		begin := len(headers)
		for _, h := range record.Headers {
			headers = append(headers, Header{Name: h.Key, Value: h.Value})
		}
		m.Headers = headers[begin:len(headers):len(headers)]
		msgs[i] = m
	}
	c.identify(l, msgs)
	return msgs
}

func (m *Message) size() int {
	n := len(m.Key) + len(m.Value)
	for _, h := range m.Headers {
		n += len(h.Name) + len(h.Value)
	}
	return n
}

// coordinatesID stands for a message without an ID. The topic's own ID is part of it: a topic that was
// deleted and made anew counts its offsets from zero again.
func coordinatesID(m *Message) uuid.UUID {
	raw := make([]byte, 0, 16+4+8+len(m.Topic))
	raw = append(raw, m.topicID[:]...)
	raw = binary.BigEndian.AppendUint32(raw, uint32(m.Partition))
	raw = binary.BigEndian.AppendUint64(raw, uint64(m.Offset))
	return dedup.MessageID(reservedScope+"coordinates:"+m.Topic, raw)
}
