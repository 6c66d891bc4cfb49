package outbox

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
)

// Names of the record headers that the relay writes itself. A message must not carry them.
const (
	HeaderMessageID  = "message-id"  // the row's ID in the usual form of 36 characters
	HeaderOccurredAt = "occurred-at" // created_at of the row, RFC 3339 in UTC with microseconds
	// HeaderPartition is the reserved header of a row that requests a partition of its topic, as a
	// decimal number: Message.Partition, or {"effectonce-partition": 3} by plain SQL. The relay
	// removes it from the record.
	HeaderPartition = "effectonce-partition"
	// HeaderTraceParent is the W3C trace context. It is an ordinary header, named here because
	// Config.Inject usually sets it.
	HeaderTraceParent = "traceparent"
)

// Message is one message to publish. Key and Payload distinguish nil (Kafka's null; a nil payload
// is a tombstone) from empty.
type Message struct {
	// ID identifies the message permanently; consumers deduplicate by it. If it is the zero value,
	// the database creates a UUIDv7.
	ID uuid.UUID
	// Topic in Kafka: 1 to 249 letters, digits, dots, underscores and hyphens.
	Topic string
	// Key decides the partition and the order: messages of one key stay in order.
	Key []byte
	// Payload is the record's value.
	Payload []byte
	// Partition of the topic, from 0 on, for receivers that read a fixed partition. Nil: the
	// relay's partitioner decides, by Key. The order of a key holds within a partition, so set the
	// same partition for all messages of a key. A number that the topic does not have makes the row
	// dead (bad_partition) and holds its key.
	Partition *int32
	// Headers in order. The same name may occur several times; the order among these is kept, the
	// order across names is not (they are stored as a JSON object).
	Headers []Header
	// DeliverAt is the time before which the message is not published, by the database's clock.
	// While a relay runs, it is published about two seconds after that time at the latest. Zero:
	// now. A time in the past is due; at most 10 years ahead. The message takes its place in the
	// order of its key when it is due, after messages that were published until then. Messages that
	// are due at the same time keep the order in which they were published. Until it is due, Cancel
	// can remove it by its ID. Publishing an ID for later that already waits changes nothing, if the
	// same role published it.
	//
	// Consumers park a message as expired if its ID is a UUIDv7 with a time before their window. So
	// if you choose the ID, use one without a time (uuid.New()) or one with the time of DeliverAt.
	// In handlers of package consumer the derived ID of a message for later carries no time.
	DeliverAt time.Time
}

// Header is one record header. A nil value is Kafka's null.
type Header struct {
	Name  string
	Value []byte
}

// ErrInvalid is wrapped by every refusal of a message. Nothing was sent to the database, and the
// transaction is unchanged. The text names message, field, value and bound.
var ErrInvalid = errors.New("message cannot be published")

var topicName = regexp.MustCompile(`^[a-zA-Z0-9._-]{1,249}$`)

func validTopic(name string) bool { return topicName.MatchString(name) && name != "." && name != ".." }

// overheadBytes is an upper bound for the size of a record without key, value and the row's own
// headers: the two headers of the relay (88), the record's varints (22) and the batch around a
// single record (61). The batch counts because the broker compares it with max.message.bytes.
const overheadBytes = 192

// Bounds of a row's key and headers, in bytes. The table's CHECK bounds the jsonb of the headers to
// 2 MiB as stored and to 8 MiB as text, which all headers within this bound fit: the JSON text may
// be six times as long as the names and values, since a control character takes six bytes (\u0001).
const keyBytesMax, headersBytesMax = 1 << 20, 1 << 20

func (m *Message) headerBytes() (n int) {
	for _, h := range m.Headers {
		n += len(h.Name) + len(h.Value) + 10
	}
	return n
}

// RecordBytes returns an upper bound, by at most a few dozen bytes, for the size of the record in
// Kafka: the bytes of a batch with only this record, which max.message.bytes limits.
func (m *Message) RecordBytes() int {
	return overheadBytes + len(m.Key) + len(m.Payload) + m.headerBytes()
}

// validate returns all problems of a message at once. index is its position in the call.
func (m *Message) validate(index, recordBytesMax int) error {
	var problems []error
	report := func(format string, args ...any) {
		problems = append(problems, fmt.Errorf("%w: message %d: %w", ErrInvalid, index, fmt.Errorf(format, args...)))
	}
	if !validTopic(m.Topic) {
		report("topic %.260q: Kafka takes 1 to 249 letters, digits, dots, underscores and hyphens", m.Topic)
	}
	if latest := time.Now().AddDate(deliverAtYearsMax, 0, 0); m.DeliverAt.After(latest) {
		report("DeliverAt is in the year %d: want at most %d years ahead", m.DeliverAt.Year(), deliverAtYearsMax)
	}
	if m.Partition != nil && *m.Partition < 0 {
		report("Partition %d: want 0 or more, or nil", *m.Partition)
	}
	if n := m.RecordBytes(); n > recordBytesMax {
		report("key, payload and headers take %d bytes, RecordBytesMax is %d: store the body elsewhere and publish a reference, or raise RecordBytesMax together with the topic's max.message.bytes", n, recordBytesMax)
	}
	if len(m.Key) > keyBytesMax {
		report("Key has %d bytes: want at most %d", len(m.Key), keyBytesMax)
	}
	if n := m.headerBytes(); n > headersBytesMax {
		report("Headers take %d bytes: want at most %d", n, headersBytesMax)
	}
	for _, h := range m.Headers {
		switch {
		case h.Name == "":
			report("header without a name")
		case h.Name == HeaderPartition:
			report("header %q is written by Publish: set Message.Partition instead", h.Name)
		case h.Name == HeaderMessageID || h.Name == HeaderOccurredAt:
			report("header %q is written by the relay: set Message.ID instead, or use another name", h.Name)
		case !utf8.ValidString(h.Name) || strings.ContainsRune(h.Name, 0):
			report("header name %.60q: want UTF-8 without NUL", h.Name)
		}
	}
	return errors.Join(problems...)
}

// storedHeaders returns the headers of the row.
func (m *Message) storedHeaders() []Header {
	if m.Partition == nil {
		return m.Headers
	}
	return append(m.Headers[:len(m.Headers):len(m.Headers)], Header{HeaderPartition, strconv.AppendInt(nil, int64(*m.Partition), 10)})
}

// binaryValue is a header value that JSON text cannot hold.
type binaryValue struct {
	Base64 string `json:"base64"`
}

// EncodeHeaders returns the stored form of headers: a JSON object. A value that is UTF-8 without
// NUL is a string, null is null, and other bytes are {"base64": "…"}. A name that occurs several
// times has an array of these.
func EncodeHeaders(headers []Header) ([]byte, error) {
	if len(headers) == 0 {
		return []byte("{}"), nil
	}
	object := make(map[string]any, len(headers))
	for _, h := range headers {
		var value any
		switch {
		case h.Value == nil:
		case utf8.Valid(h.Value) && bytes.IndexByte(h.Value, 0) < 0:
			value = string(h.Value)
		default:
			value = binaryValue{Base64: base64.StdEncoding.EncodeToString(h.Value)}
		}
		switch earlier, ok := object[h.Name]; {
		case !ok:
			object[h.Name] = value
		default:
			if list, isList := earlier.([]any); isList {
				object[h.Name] = append(list, value)
			} else {
				object[h.Name] = []any{earlier, value}
			}
		}
	}
	return json.Marshal(object)
}

// DecodeHeaders reads the stored form, also if another program wrote it: numbers and booleans
// become their JSON text. Any other value is an error that names the header.
func DecodeHeaders(stored []byte) ([]Header, error) {
	if string(stored) == "{}" {
		return nil, nil
	}
	return newOrderedObject(stored).headers()
}
