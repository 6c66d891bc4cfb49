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

// rowOverheadBytes is the memory of a row in addition to its values: the row, its record, two
// headers.
const rowOverheadBytes = 400

func (r *row) bytes() int { return rowOverheadBytes + len(r.key) + len(r.payload) + len(r.headers) }

// page is what one statement read.
type page struct {
	rows  []row
	bytes int
	// full: the batch may have more rows after these.
	full bool
	// deferred: the next row is larger than the statement sends.
	deferred bool
	// large: a row is larger than fetchSQL would send.
	large bool
	// What the statement saw: its snapshot, the last assigned seq, and how many transaction ids
	// from the snapshot's xmax on were assigned before it read that seq.
	snapshot string
	seqLast  int64
	given    uint64
	here     bool // the statement ran on the server of the lease
}

// largeBytes is the largest payload that fetchSQL sends.
const largeBytes = 16 << 10

var noHeaders = []byte("{}") //nolint:gochecknoglobals // only read

// postgresEpoch is the zero of binary timestamps, in Unix microseconds.
const postgresEpoch = 946684800 * 1_000_000

// extent is the maximum size of a page, and the size of the previous one.
type extent struct {
	rows, bytes           int
	sized                 bool // the statement is fetchSizedSQL
	rowsBefore, arenaSize int
}

// readPage reads the rows of a result set of fetchSQL or fetchSizedSQL. After a row that passes the
// bytes of the extent, or whose payload was not sent, it discards the rest of the result; the next page
// reads it again. Values are read in their binary form: a Scan by reflection costs more than
// everything else here.
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
		if string(v[2]) != last { // consecutive rows mostly have the same topic
			last = string(v[2])
		}
		r := row{seq: int64(binary.BigEndian.Uint64(v[0])), id: uuid.UUID(v[1]), topic: last}
		r.key, arena = copyTo(arena, v[3])
		r.payload, arena = copyTo(arena, v[4])
		if r.headers = noHeaders; v[5] != nil {
			r.headers, arena = copyTo(arena, v[5])
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

// payloads is the sum that fetchSizedSQL computes.
func (p *page) payloads() (bytes int) {
	for i := range p.rows {
		bytes += len(p.rows[i].payload) + len(p.rows[i].key)
	}
	return bytes
}

var errNoOrder = errors.New("the statement's rows are not in order: please report it with the server's version and settings")

// copyTo copies a value into the arena. It preserves the difference between NULL and empty.
func copyTo(arena, v []byte) (kept, rest []byte) {
	if v == nil {
		return nil, arena
	}
	start := len(arena)
	arena = append(arena, v...)
	return arena[start:len(arena):len(arena)], arena
}
