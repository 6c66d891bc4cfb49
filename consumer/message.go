package consumer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/outbox"
)

// Message is one Kafka record. Handlers must not change it.
type Message struct {
	// ID under which the message is claimed. See dedup.MessageID.
	ID        uuid.UUID
	Topic     string
	Partition int32
	Offset    int64
	// Key and Value distinguish nil (Kafka's null) from empty.
	Key, Value []byte
	Headers    []Header
	// Time is the record's timestamp, limited to the years -4000 to 294000.
	Time time.Time

	topicID   uuid.UUID // zero if the broker does not know it
	alias     string    // what the topic is called in names and IDs: see Config.Aliases
	record    *kgo.Record
	named     bool      // its ID is known; otherwise Config.IDFunc is asked
	plain     bool      // it is identified by its coordinates alone
	original  *Message  // of which this is the form under its coordinates; nil: none
	released  time.Time // if it was parked: the time in the IDs of what it publishes
	scope     string    // the consumer's name
	row       int64     // its seq in parked_messages; 0: it comes from Kafka
	park      *parking  // why it is parked and not handled; nil: it is handled
	attempts  int       // at it alone
	large     bool      // its payload is not stored
	counted   bool      // the attempt in progress is counted
	first     time.Time // when its first attempt alone began
	conflicts int       // attempts that ended because of another transaction, and are not counted
	place     int       // in the backlog
}

// Range of times that the database can store. A producer chooses a record's timestamp: a partition
// must not stop at one outside of the range.
//
//nolint:gochecknoglobals // constants
var (
	timeMin = time.Date(-4000, 1, 1, 0, 0, 0, 0, time.UTC)
	timeMax = time.Date(294000, 1, 1, 0, 0, 0, 0, time.UTC)
)

// recordTime is the timestamp of a record, limited to the range that the database can store.
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

// Header is one record header, as package outbox publishes it. Kafka's null is a nil Value.
type Header = outbox.Header

// Header returns the value of the first header with the given name.
func (m *Message) Header(name string) ([]byte, bool) {
	for _, h := range m.Headers {
		if h.Name == name {
			return h.Value, true
		}
	}
	return nil, false
}

// Record returns the Kafka record of the message, as the client read it. It is nil if the message
// was parked and is retried. The record must not be changed.
func (m *Message) Record() *kgo.Record { return m.record }

// CallKey derives the key of a call to another system. The key depends only on the consumer's name,
// the message's ID and the step, so it is the same in every attempt, and after parking, retry,
// promotion and release. Each call in a handler needs its own step. The key contains no time:
// messages that a handler publishes have other IDs, see PublishID.
func (m *Message) CallKey(step string) uuid.UUID { return dedup.CallKey(m.scope, m.ID, step) }

// PublishID derives the ID of a message to be published from the consumer's name, this message and a
// step. It is the same in every re-execution. It contains the time of the record, or of the release
// from parking, so that the next consumer can prove the message fresh, unless that is no time. Messages that a handler
// publishes through its tx get such an ID automatically. A batch handler must call PublishID.
func (m *Message) PublishID(step string) uuid.UUID {
	at := m.Time
	if !m.released.IsZero() {
		at = m.released
	}
	if at.Year() < timeBegins {
		return dedup.LaterID(m.scope, m.ID, step)
	}
	return dedup.PublishID(m.scope, m.ID, step, at)
}

// String identifies the message for logs, without key or value.
func (m *Message) String() string {
	return fmt.Sprintf("message %s (topic %s, partition %d, offset %d)", m.ID, m.Topic, m.Partition, m.Offset)
}

func headerParts(h Header) (name string, value []byte) { return h.Name, h.Value }

// headersMax bounds the number of headers of a message, which are searched linearly.
const headersMax = 1000

// messages converts records of the partition to messages, with one allocation for all messages and
// one for all headers.
func (p *partition) messages(records []*kgo.Record) []*Message {
	rule := p.name.IDRule()
	n := 0
	for _, record := range records {
		n += len(record.Headers)
	}
	slab, headers, msgs := make([]Message, len(records)), make([]Header, 0, n), make([]*Message, len(records))
	for i, record := range records {
		m := &slab[i]
		*m = Message{
			Topic: record.Topic, Partition: record.Partition, Offset: record.Offset,
			Key: record.Key, Value: record.Value, Time: recordTime(record), topicID: p.pos.topicID, record: record,
			scope: p.scope, alias: p.alias,
		}
		begin := len(headers)
		for _, h := range record.Headers {
			headers = append(headers, Header{Name: h.Key, Value: h.Value})
		}
		m.Headers = headers[begin:len(headers):len(headers)]
		if p.consumer.identify(m, rule); p.consumer.cfg.Order != OrderByPartition {
			m = m.alone()
		}
		msgs[i] = m
	}
	return msgs
}

// errSuspect: the messages that the last holder of the partition may have been handling are parked,
// and each is tried alone, so that one that ends the process is found.
var errSuspect = errors.New("the last holder of the partition ended without finishing anything: the message is tried alone")

// alone copies a message into its own memory: the client reads many records into one buffer, and a
// slow message must not keep that buffer alive.
func (m *Message) alone() *Message {
	own, record := *m, *m.record
	buffer := make([]byte, 0, m.size())
	keep := func(b []byte) []byte {
		if b == nil {
			return nil
		}
		begin := len(buffer)
		buffer = append(buffer, b...)
		return buffer[begin:len(buffer):len(buffer)]
	}
	own.Key, own.Value = keep(m.Key), keep(m.Value)
	own.Headers, record.Headers = make([]Header, len(m.Headers)), slices.Clone(record.Headers)
	for n, header := range m.Headers {
		own.Headers[n] = Header{Name: header.Name, Value: keep(header.Value)}
		record.Headers[n].Value = own.Headers[n].Value
	}
	record.Key, record.Value = own.Key, own.Value
	own.record = &record
	return &own
}

func (m *Message) size() int {
	n := len(m.Key) + len(m.Value)
	for _, h := range m.Headers {
		n += len(h.Name) + len(h.Value)
	}
	return n
}

// coordinatesID is the ID of a message that carries none. It includes the topic's ID: a topic that
// was deleted and recreated starts again at offset zero.
func coordinatesID(m *Message) uuid.UUID {
	raw := make([]byte, 0, 16+4+8+len(m.Topic))
	raw = append(raw, m.topicID[:]...)
	raw = binary.BigEndian.AppendUint32(raw, uint32(m.Partition))
	raw = binary.BigEndian.AppendUint64(raw, uint64(m.Offset))
	return dedup.MessageID(reservedScope+"coordinates:"+m.Topic, raw)
}

// underCoordinates is the message under an ID of its own: its coordinates, and its fingerprint, which
// distinguishes it where the coordinates themselves are taken (a topic that was recreated on brokers
// without topic IDs).
func (m *Message) underCoordinates() *Message {
	own, id := *m, coordinatesID(m)
	own.original = m
	own.ID = dedup.MessageID(reservedScope+"conflict:"+m.Topic, binary.BigEndian.AppendUint32(id[:], uint32(dedup.Fingerprint(m.Key, m.Value))))
	return &own
}
