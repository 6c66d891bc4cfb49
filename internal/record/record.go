// Package record makes Kafka records from outbox rows: their headers and partition.
package record

import (
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kgo"
)

// The reserved headers. Package outbox has them for users, under the same names.
const (
	HeaderMessageID  = "message-id"
	HeaderOccurredAt = "occurred-at"
	HeaderPartition  = "effectonce-partition"
)

// Bounds on the bytes of a record.
const (
	BytesDefault = 1_048_588  // Kafka's default of max.message.bytes
	BytesMax     = 90_000_000 // below what the client writes in one request
)

// Header has the underlying type of outbox.Header: this package does not import the library.
type Header interface {
	~struct {
		Name  string
		Value []byte
	}
}

type header struct {
	Name  string
	Value []byte
}

// Maker makes records from rows. It allocates all records at once, and most headers: the relay's
// share of the cost of a row is deliberately small.
type Maker struct {
	records []kgo.Record
	headers []kgo.RecordHeader
	text    []byte
	now     time.Time // the client would read the clock for each record
	second  int64     // the second of the cached text
	seconds []byte    // consecutive rows mostly share the text of their second
}

const (
	idLength   = 36
	timeLayout = "2006-01-02T15:04:05.000000Z"
)

// NewMaker returns a Maker for about n rows.
func NewMaker(n int) *Maker {
	return &Maker{
		records: make([]kgo.Record, 0, n),
		headers: make([]kgo.RecordHeader, 0, 2*n),
		text:    make([]byte, 0, n*(idLength+len(timeLayout))),
		now:     time.Now(),
	}
}

// Row is the part of an outbox row that a record needs.
type Row struct {
	ID           uuid.UUID
	Topic        string
	Key, Payload []byte
	CreatedAt    time.Time
}

// Make makes the record of a row. The row's own headers follow the ID and the time. A header that
// uses one of their names (possible only by plain SQL) is left out: the row's ID is binding.
func Make[H Header](m *Maker, r Row, own []H) *kgo.Record {
	start := len(m.text)
	m.text = appendUUID(m.text, r.ID)
	m.text = m.appendTime(m.text, r.CreatedAt)
	text := m.text[start:len(m.text):len(m.text)]
	first := len(m.headers)
	m.headers = append(m.headers,
		kgo.RecordHeader{Key: HeaderMessageID, Value: text[:idLength:idLength]},
		kgo.RecordHeader{Key: HeaderOccurredAt, Value: text[idLength:]})
	headers := m.headers[first:len(m.headers):len(m.headers)]
	for _, one := range own {
		if h := header(one); h.Name != HeaderMessageID && h.Name != HeaderOccurredAt {
			headers = append(headers, kgo.RecordHeader{Key: h.Name, Value: h.Value})
		}
	}
	m.records = append(m.records, kgo.Record{Topic: r.Topic, Key: r.Key, Value: r.Payload, Headers: headers, Timestamp: m.now})
	return &m.records[len(m.records)-1]
}

// appendTime appends a time in timeLayout. Formatting each time by its layout took 5 percent of the
// CPU of a row.
func (m *Maker) appendTime(b []byte, t time.Time) []byte {
	if second := t.Unix(); m.seconds == nil || second != m.second {
		m.second, m.seconds = second, t.UTC().AppendFormat(m.seconds[:0], timeLayout[:len(timeLayout)-len("000000Z")])
	}
	b = append(b, m.seconds...)
	micros := t.Nanosecond() / 1000
	for unit := 100_000; unit > 0; unit /= 10 {
		b = append(b, byte('0'+micros/unit%10))
	}
	return append(b, 'Z')
}

func appendUUID(b []byte, id uuid.UUID) []byte {
	const digits = "0123456789abcdef"
	for i, c := range id {
		if i == 4 || i == 6 || i == 8 || i == 10 {
			b = append(b, '-')
		}
		b = append(b, digits[c>>4], digits[c&15])
	}
	return b
}
