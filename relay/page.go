package relay

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/outbox"
)

// row is one outbox row in memory. Its byte slices point into the page's arena.
type row struct {
	seq     int64
	topic   string
	key     []byte
	payload []byte
	id      uuid.UUID
	headers []byte // JSON text
	created time.Time
}

// rowOverheadBytes is what a row takes in memory beside its values: the row, its record, two headers.
const rowOverheadBytes = 400

func (r *row) bytes() int { return rowOverheadBytes + len(r.key) + len(r.payload) + len(r.headers) }

// page is what one statement read.
type page struct {
	rows  []row
	bytes int
	// full: the batch may have more rows behind these.
	full bool
	// deferred: the row behind these is larger than the statement sends.
	deferred bool
	// large: a row is larger than fetchSQL would send.
	large bool
	// What the statement saw: its snapshot, the last seq that was given out, and how many transaction ids from the snapshot's xmax
	// on were given out before it knew that.
	snapshot string
	seqLast  int64
	given    uint64
	here     bool // on the server of the lease
}

// largeBytes is the largest payload that fetchSQL sends.
const largeBytes = 16 << 10

var noHeaders = []byte("{}") //nolint:gochecknoglobals // only read

// postgresEpoch is the zero of binary timestamps, in Unix microseconds.
const postgresEpoch = 946684800 * 1_000_000

// extent is how large a page may be, and how large the one before was.
type extent struct {
	rows, bytes           int
	rowsBefore, arenaSize int
}

// readPage takes rows out of a result set of fetchSQL or fetchSizedSQL. Behind a row that passes the bytes of the extent, or
// that was left out, the rest of the result is read and dropped, and comes again with the next page.
// Values are read in their binary form: a Scan by reflection costs more than everything else here.
func readPage(rows pgx.Rows, want extent) (*page, error) {
	defer rows.Close()
	if !rows.Next() {
		return nil, cmp.Or(rows.Err(), errors.New("the statement brought no snapshot"))
	}
	v := rows.RawValues()
	if v[0] != nil {
		return nil, errNoOrder
	}
	p := &page{snapshot: string(v[2]), seqLast: int64(binary.BigEndian.Uint64(v[7])), here: v[8][0] == 1}
	var err error
	if p.given, err = strconv.ParseUint(string(v[5]), 10, 31); err != nil {
		return nil, fmt.Errorf("transaction ids that were given out: %w", err)
	}
	p.rows = make([]row, 0, want.rowsBefore)
	arena := make([]byte, 0, want.arenaSize)
	for last := ""; rows.Next(); {
		v := rows.RawValues()
		if p.deferred = v[7] != nil; p.deferred || p.bytes > want.bytes {
			p.full = true
			break
		}
		if need := len(v[3]) + len(v[4]) + len(v[5]); cap(arena)-len(arena) < need {
			arena = make([]byte, 0, max(need, 256<<10))
		}
		if string(v[2]) != last { // rows that follow each other mostly have one topic
			last = string(v[2])
		}
		r := row{seq: int64(binary.BigEndian.Uint64(v[0])), id: uuid.UUID(v[1]), topic: last}
		r.key, arena = keep(arena, v[3])
		r.payload, arena = keep(arena, v[4])
		if r.headers = noHeaders; v[5] != nil {
			r.headers, arena = keep(arena, v[5])
		}
		r.created = time.UnixMicro(int64(binary.BigEndian.Uint64(v[6])) + postgresEpoch)
		if n := len(p.rows); n > 0 && p.rows[n-1].seq >= r.seq {
			return nil, errNoOrder
		}
		p.rows = append(p.rows, r)
		p.bytes += r.bytes()
		p.large = p.large || len(r.payload) > largeBytes
	}
	rows.Close()
	if err := rows.Err(); err != nil {
		return nil, err
	}
	p.full = p.full || len(p.rows) == want.rows
	return p, nil
}

// payloads is what fetchSizedSQL sums up.
func (p *page) payloads() (bytes int) {
	for i := range p.rows {
		bytes += len(p.rows[i].payload) + len(p.rows[i].key)
	}
	return bytes
}

var errNoOrder = errors.New("the statement's rows are not in order: please report it with the server's version and settings")

// keep copies a value into the arena and keeps the difference between NULL and empty.
func keep(arena, v []byte) (kept, rest []byte) {
	if v == nil {
		return nil, arena
	}
	start := len(arena)
	arena = append(arena, v...)
	return arena[start:len(arena):len(arena)], arena
}

// records turns rows into Kafka records. One allocation for all records and one for most headers: the
// relay's share of the cost of a row is small on purpose.
type recordMaker struct {
	records []kgo.Record
	headers []kgo.RecordHeader
	text    []byte
	now     time.Time // the client would ask the clock for each record
	second  int64     // whose text is in seconds
	seconds []byte    // rows that follow each other mostly have theirs in common
}

const (
	idLength   = 36
	timeLayout = "2006-01-02T15:04:05.000000Z"
)

func newRecordMaker(n int) *recordMaker {
	return &recordMaker{
		records: make([]kgo.Record, 0, n),
		headers: make([]kgo.RecordHeader, 0, 2*n),
		text:    make([]byte, 0, n*(idLength+len(timeLayout))),
		now:     time.Now(),
	}
}

// add builds the record of a row. The row's own headers come after the relay's; one that uses the name
// of a relay's header (possible by plain SQL only) is left out, since the row's id is what counts.
func (m *recordMaker) add(r *row, own []outbox.Header) *kgo.Record {
	start := len(m.text)
	m.text = appendUUID(m.text, r.id)
	m.text = m.appendTime(m.text, r.created)
	text := m.text[start:len(m.text):len(m.text)]
	first := len(m.headers)
	m.headers = append(m.headers,
		kgo.RecordHeader{Key: outbox.HeaderMessageID, Value: text[:idLength:idLength]},
		kgo.RecordHeader{Key: outbox.HeaderOccurredAt, Value: text[idLength:]})
	headers := m.headers[first:len(m.headers):len(m.headers)]
	for _, h := range own {
		if h.Name != outbox.HeaderMessageID && h.Name != outbox.HeaderOccurredAt {
			headers = append(headers, kgo.RecordHeader{Key: h.Name, Value: h.Value})
		}
	}
	m.records = append(m.records, kgo.Record{Topic: r.topic, Key: r.key, Value: r.payload, Headers: headers, Timestamp: m.now})
	return &m.records[len(m.records)-1]
}

// appendTime appends a time in timeLayout. To format each by its layout was 5 percent of the CPU of a row.
func (m *recordMaker) appendTime(b []byte, t time.Time) []byte {
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
