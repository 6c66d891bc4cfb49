package relay

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/crashpoint"
)

// reader reads the outbox page by page. After a full page it reads the next page while this one is
// published: the database and this process work at the same time.
type reader struct {
	*publisher
	care  *care
	at    cursor    // behind the last page that was handed over
	mark  floorMark // when the floor may move
	limit int       // rows of the next page
	ahead <-chan fetched
	pace  pace

	// State of the last page. Only the read under way uses it.
	lastPageSmall bool
	fastRoundTrip bool
	limitBySize   bool // large rows were met
	passing       passing
}

// fetched is a page that was read, and where it ends.
type fetched struct {
	page *page
	seen *tick // of the statement
	err  error
	end  cursor
	// complete: nothing else was visible when the page was read.
	complete bool
	// woken is closed by a Wake after the statement was sent: the statement may not have seen the
	// rows of that Wake.
	woken <-chan struct{}
}

func newReader(p *publisher) *reader {
	care := p.care(false)
	r := &reader{publisher: p, care: care, limit: care.limit(min(100, p.cfg.PageRowsMax)), pace: pace{min: p.cfg.PollMin, max: p.cfg.PollMax}, passing: passing{safe: p.lease.seq}}
	r.from(p.lease.cursor)
	return r
}

// from sets where the next page starts. No read may be under way.
func (r *reader) from(at cursor) {
	r.at = at
	r.mark = floorMark{xmax: at.from.xmax, seqLast: at.from.seqLast}
}

// next returns the page that was read ahead, or reads one.
func (r *reader) next(ctx context.Context) (*fetched, error) {
	var read fetched
	if r.ahead != nil {
		read, r.ahead = <-r.ahead, nil
	} else {
		read = r.fetch(ctx, r.at, r.limit)
	}
	if read.err != nil {
		return nil, read.err
	}
	crashpoint.Here(crashpoint.RelayRead)
	read.end, read.complete = r.at.next(read.page, read.seen), r.at.to == nil && !read.page.full
	r.pace.saw(len(read.page.rows))
	r.limit = r.care.limit(nextLimit(r.limit, read.page, r.flight.bytesMax, r.cfg.PageRowsMax))
	switch careful := r.care.left.Load() > 0; {
	case read.page.full && !careful:
		r.ahead = r.fetchAhead(ctx, read.end, r.limit)
	case !read.page.full:
		read.end.floor = r.mark.advance(read.end.from, read.end.floor)
	}
	return &read, nil
}

// behind returns rows behind a page, to see whether Kafka takes one.
func (r *reader) behind(ctx context.Context, end cursor) (*page, error) {
	if r.ahead != nil {
		got, again := <-r.ahead, make(chan fetched, 1)
		again <- got
		r.ahead = again
		return got.page, got.err
	}
	got := r.fetch(ctx, end, seekRowsMax)
	return got.page, got.err
}

// seekRowsMax is how many rows behind a page are tried at most.
const seekRowsMax = 1000

// stop waits for the read under way, whose context has ended.
func (r *reader) stop() {
	if r.ahead != nil {
		<-r.ahead
	}
}

// nextLimit lets pages grow to PageRowsMax while their rows are small, so that a page of large rows
// takes no more memory than a page of small ones.
func nextLimit(limit int, page *page, bytesMax, rowsMax int) int {
	if len(page.rows) == 0 {
		return limit
	}
	fit := bytesMax / 4 / max(1, page.bytes/len(page.rows))
	return max(1, min(4*limit, fit, rowsMax))
}

func (r *reader) fetchAhead(ctx context.Context, c cursor, limit int) <-chan fetched {
	result := make(chan fetched, 1)
	go func() { result <- r.fetch(ctx, c, limit) }()
	return result
}

// fetch reads the page behind a cursor, and the tick behind the page.
func (r *reader) fetch(ctx context.Context, c cursor, limit int) (read fetched) {
	read.woken = r.wake.next() // before the statement
	ctx, cancel := r.patient(ctx)
	defer cancel()
	var err error
	if read.page, read.seen, err = r.readChanges(ctx, c, limit); err != nil {
		read.err = fmt.Errorf("read outbox: %w", silence(ctx, err))
	}
	return read
}

func (r *reader) readChanges(ctx context.Context, c cursor, limit int) (*page, *tick, error) {
	if c.to == nil && r.lastPageSmall && r.fastRoundTrip {
		var snapshot string
		if err := r.pool.QueryRow(ctx, probeSQL).Scan(&snapshot); err != nil {
			return nil, nil, err
		}
		if snapshot == c.from.snapshot {
			return &page{seqLast: r.progress.seqRead.Load()}, c.from, nil
		}
	}
	read, err := r.query(ctx, c, limit)
	if err == nil && read.deferred && len(read.rows) == 0 { // the next row is a large one
		r.limitBySize = true
		read, err = r.query(ctx, c, limit)
	}
	if err != nil {
		return nil, nil, err
	}
	if !read.here {
		return nil, nil, errAnotherRun
	}
	if err := sequenceBack(read.seqLast, max(r.progress.seqRead.Load(), c.floor, c.from.seqLast)); err != nil {
		return nil, nil, err
	}
	r.limitBySize = read.deferred || r.limitBySize && read.large
	r.lastPageSmall = len(read.rows) <= fewRows
	seen, err := newTick(read.snapshot, 0)
	if err != nil {
		return nil, nil, err
	}
	r.passing.saw(read.seqLast, seen.xmax+read.given)
	seen.seqLast = max(r.passing.below(seen.xmax), c.floor) // an earlier snapshot has passed everything up to the floor
	seen.run = r.lease.cluster.run
	return read, seen, nil
}

const (
	// fewRows: after a page of at most this many rows, the next poll begins with a probe. A probe
	// costs the server a quarter of a poll that finds nothing.
	fewRows = 8
	// nearMax: if a round trip takes longer, a probe costs more time than it saves.
	nearMax = time.Millisecond
)

// query sends the settings and the statement in one round trip and one transaction. The settings
// end with the transaction.
func (r *reader) query(ctx context.Context, c cursor, limit int) (*page, error) {
	after := max(c.seq, c.floor)
	var upTo *string
	if c.to != nil {
		upTo = &c.to.snapshot
	}
	sql, bytes := r.sql.of(fetchSQL), largeBytes
	if r.limitBySize {
		sql, bytes = r.sql.of(fetchSizedSQL), r.flight.bytesMax/4
	}
	args := []any{r.lease.cluster.run, max(after, c.from.seqLast), c.from.snapshot, limit, upTo, r.lease.shards, r.lease.shard, bytes, c.from.xip, after}
	if len(c.from.xip) == 0 && !r.limitBySize {
		sql, args = r.sql.of(fetchNewSQL), args[:8]
	}
	batch := &pgx.Batch{}
	batch.Queue(fetchSettingsSQL)
	batch.Queue(sql, args...)
	begun := time.Now()
	results := r.pool.SendBatch(ctx, batch)
	defer func() { _ = results.Close() }()
	if _, err := results.Exec(); err != nil {
		return nil, err
	}
	r.fastRoundTrip = time.Since(begun) < nearMax // this answer comes before the page
	rows, err := results.Query()
	if err != nil {
		return nil, err
	}
	read, err := readPage(rows, limit, r.flight.bytesMax/4)
	if err == nil && r.limitBySize {
		read.full = read.full || read.payloads() >= r.flight.bytesMax/4
	}
	return read, err
}

// pace is the wait before the next poll: the minimum for a while after a page with rows, then twice
// as long each time.
type pace struct {
	min, max time.Duration
	last     time.Time // with rows
	wait     time.Duration
}

// hotFor is how long a reader polls at the minimum pause after a page with rows.
const hotFor = 20 * time.Millisecond

func (p *pace) saw(rows int) {
	switch {
	case rows > 0:
		p.last, p.wait = time.Now(), p.min
	case time.Since(p.last) < hotFor:
		p.wait = p.min
	default:
		p.wait = min(max(2*p.wait, p.min), p.max)
	}
}

// row is one outbox row in memory. Its byte slices point into the page's arena.
type row struct {
	seq     int64
	topic   string
	key     []byte
	payload []byte
	id      uuid.UUID
	headers []byte // JSON text
	created time.Time
	was     Reason // of a row in outbox_dead
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

// readPage reads the rows of a result set of fetchSQL or fetchSizedSQL. After a row that passes
// bytesMax, or whose payload was not sent, it discards the rest of the result; the next page
// reads it again. Values are read in their binary form: a Scan by reflection costs more than
// everything else here.
func readPage(rows pgx.Rows, rowsMax, bytesMax int) (*page, error) {
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
	var arena []byte
	for last := ""; rows.Next(); {
		v := rows.RawValues()
		if p.deferred = v[7] != nil; p.deferred || p.bytes > bytesMax {
			p.full = true
			break
		}
		if need := len(v[3]) + len(v[4]) + len(v[5]); cap(arena)-len(arena) < need {
			arena = make([]byte, 0, max(need, min(2*cap(arena), 256<<10), 1<<10))
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
	p.full = p.full || len(p.rows) == rowsMax
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
