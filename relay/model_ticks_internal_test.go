package relay

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
)

// The model of the tick algebra. Writers take transaction ids, numbers and locks of keys as
// PostgreSQL assigns them. The reader polls, publishes and stores progress; its statements are
// split where something else may happen in between. The decisions are the engine's: cursor.next,
// floorMark.advance, passing, tick.divider. The conditions of fetchSQL and unpublishedSQL are
// written out.
const (
	modelWriters = 3
	modelRows    = 4
)

type ticksBounds struct {
	writers   int
	rowsEach  int
	rows      int
	keys      int
	page      int // rows of a page
	stores    int // writes of progress, which take transaction ids
	crashes   int
	aborts    int
	turns     int // of the slot
	statesMax int
}

// ticksBreak is a planted mistake.
type ticksBreak struct {
	lateForgotten   bool // transactions that were open in the earlier tick are not looked up
	lastAssigned    bool // the number read by the poll divides the rows, as if it were safe
	nextUnread      bool // a number is taken as passed by any later snapshot
	floorAtOnce     bool // the floor does not wait for open transactions
	byTransaction   bool // rows are read in the order of transaction ids
	storesUnacked   bool // progress is stored before the page is published
	truncateXip     bool // the check of a slot ignores the tick's list of open transactions
	truncateUnheld  bool // a slot is truncated without its lock
	pageForgotten   bool // a full page ends its batch
	lockAfterInsert bool // writers insert before they hold the lock of the key
}

type modelTick struct {
	xmin, xmax uint8
	xip        uint16 // bits
	seqLast    uint8
}

type modelCursor struct {
	from, to   modelTick
	more       bool // to is set
	seq, floor uint8
}

type modelWriter struct {
	xid, rows, locks uint8
	over, aborted    bool
}

type modelRow struct {
	writer, key, slot uint8
	committed, there  bool
	published         bool
}

type ticksState struct {
	writers  [modelWriters]modelWriter
	rows     [modelRows + 1]modelRow // by number, from 1
	assigned uint8                   // numbers of rows
	next     uint8                   // next transaction id
	latest   uint8                   // latest ended one
	slot     uint8

	// The reader.
	running                bool
	beginning              bool  // it read the sequence, and takes the lease next
	polled                 uint8 // 0: no statement, 1: it has its snapshot, 2: and the sequence
	polledSafe, polledLast uint8
	snapshot               modelTick
	visible                uint8 // rows that its statement sees; bits
	at                     modelCursor
	mark                   [2]uint8 // xmax, seqLast
	waiting                [passingMax][2]uint8
	waits, safe            uint8
	read, readSafe         uint8
	unpublished            uint8 // rows of the page that is not published yet; only with storesUnacked

	// A write of progress under way, and what is stored.
	storeXid  uint8
	storeRead uint8
	storing   modelCursor
	stored    modelCursor

	stores, crashes, aborts, turns uint8
	wrong                          uint8
}

const (
	wrongOrder = 1 + iota
	wrongTwice
	wrongTruncated
)

var errModel = errors.New("invariant")

func (m modelTick) engine() *tick {
	t := &tick{xmin: uint64(m.xmin), xmax: uint64(m.xmax), seqLast: int64(m.seqLast)}
	for x := uint8(0); x < 16; x++ {
		if m.xip&(1<<x) != 0 {
			t.xip = append(t.xip, strconv.Itoa(int(x)))
		}
	}
	return t
}

func tickOf(t *tick) modelTick {
	m := modelTick{xmin: uint8(t.xmin), xmax: uint8(t.xmax), seqLast: uint8(t.seqLast)}
	for _, text := range t.xip {
		x, err := strconv.Atoi(text)
		if err != nil {
			panic(err)
		}
		m.xip |= 1 << x
	}
	return m
}

// engine makes the engine's cursor; a later tick keeps its pointer, which next compares with nil.
func (c modelCursor) engine() cursor {
	e := cursor{from: c.from.engine(), seq: int64(c.seq), floor: int64(c.floor)}
	if c.more {
		e.to = c.to.engine()
	}
	return e
}

func cursorOf(e cursor) modelCursor {
	c := modelCursor{from: tickOf(e.from), seq: uint8(e.seq), floor: uint8(e.floor)}
	if e.to != nil {
		c.to, c.more = tickOf(e.to), true
	}
	return c
}

// sees is pg_visible_in_snapshot.
func (m modelTick) sees(xid uint8) bool { return xid < m.xmax && m.xip&(1<<xid) == 0 }

func (s *ticksState) xid(row int) uint8 { return s.writers[s.rows[row].writer].xid }

// take is pg_current_snapshot. xmax is behind the latest transaction that has ended, which may be
// below ids that are assigned.
func (s *ticksState) take() modelTick {
	m := modelTick{xmax: s.latest + 1}
	for _, w := range s.writers {
		if w.xid != 0 && !w.over && w.xid < m.xmax {
			m.xip |= 1 << w.xid
		}
	}
	if s.storeXid != 0 && s.storeXid < m.xmax {
		m.xip |= 1 << s.storeXid
	}
	m.xmin = m.xmax
	for x := m.xmax; x > 0; x-- {
		if m.xip&(1<<(x-1)) != 0 {
			m.xmin = x - 1
		}
	}
	return m
}

func (s *ticksState) end(xid uint8) { s.latest = max(s.latest, xid) }

// fetch is fetchSQL, on the statement's snapshot.
func (s *ticksState) fetch(b ticksBounds, broken ticksBreak) (rows []int, full bool) {
	from := s.at.from.engine()
	until := s.snapshot
	if s.at.more {
		until = s.at.to
	}
	after := int64(max(s.at.seq, s.at.floor))
	divide := max(after, from.divider())
	for n := 1; n <= int(s.assigned); n++ {
		xid, seq := s.xid(n), int64(n)
		if s.visible&(1<<n) == 0 || !until.sees(xid) {
			continue
		}
		late := s.at.from.xip&(1<<xid) != 0 && seq > after && seq <= divide && !broken.lateForgotten
		if seq > divide && !s.at.from.sees(xid) || late {
			rows = append(rows, n)
		}
	}
	if broken.byTransaction {
		slices.SortStableFunc(rows, func(a, b int) int { return int(s.xid(a)) - int(s.xid(b)) })
	}
	if len(rows) >= b.page {
		return rows[:b.page], true
	}
	return rows, false
}

// publish sends a page, and notes what must not happen.
func (s *ticksState) publish(rows []int) {
	for _, n := range rows {
		row := &s.rows[n]
		if row.published {
			if s.crashes == 0 {
				s.wrong = wrongTwice
			}
			continue
		}
		for earlier := 1; earlier < n; earlier++ {
			e := s.rows[earlier]
			if e.key == row.key && e.there && e.committed && !e.published {
				s.wrong = wrongOrder
			}
		}
		for later := n + 1; later <= int(s.assigned); later++ {
			if l := s.rows[later]; l.key == row.key && l.published {
				s.wrong = wrongOrder
			}
		}
		row.published = true
	}
}

// readPage is readChanges and next: the page at the cursor, and the cursor behind it.
func (s *ticksState) readPage(b ticksBounds, broken ticksBreak) {
	rows, full := s.fetch(b, broken)
	p := passing{safe: int64(s.safe)}
	for _, w := range s.waiting[:s.waits] {
		p.waiting = append(p.waiting, numbered{int64(w[0]), uint64(w[1])})
	}
	next := s.next
	if broken.nextUnread {
		next = 0
	}
	seen := s.snapshot.engine()
	p.saw(int64(s.polledLast), uint64(next))
	seen.seqLast = max(int64(s.polledSafe), p.below(seen.xmax), int64(s.at.floor))
	if broken.lastAssigned {
		seen.seqLast = int64(s.polledLast)
	}
	s.waiting, s.waits, s.safe = [passingMax][2]uint8{}, uint8(len(p.waiting)), uint8(p.safe)
	for i, w := range p.waiting {
		s.waiting[i] = [2]uint8{uint8(w.seq), uint8(w.next)}
	}
	pg := &page{full: full && !broken.pageForgotten}
	for _, n := range rows {
		pg.rows = append(pg.rows, row{seq: int64(n)})
	}
	end := s.at.engine().next(pg, seen)
	if !pg.full {
		mark := floorMark{xmax: uint64(s.mark[0]), seqLast: int64(s.mark[1])}
		end.floor = mark.advance(end.from, end.floor)
		s.mark = [2]uint8{uint8(mark.xmax), uint8(mark.seqLast)}
		if broken.floorAtOnce {
			end.floor = max(end.floor, end.from.seqLast)
		}
	}
	s.at, s.read = cursorOf(end), s.polledLast
	if broken.storesUnacked {
		for _, n := range rows {
			s.unpublished |= 1 << n
		}
	} else {
		s.publish(rows)
	}
	s.polled, s.polledSafe, s.polledLast, s.snapshot, s.visible = 0, 0, 0, modelTick{}, 0
}

func (s *ticksState) forgetReader() {
	s.running, s.beginning, s.polled, s.polledSafe, s.polledLast, s.visible, s.unpublished = false, false, 0, 0, 0, 0, 0
	s.snapshot, s.at, s.mark, s.waiting, s.waits, s.safe, s.read, s.readSafe = modelTick{}, modelCursor{}, [2]uint8{}, [passingMax][2]uint8{}, 0, 0, 0, 0
}

func (b ticksBounds) writerSteps(s ticksState, broken ticksBreak, to func(ticksState, string, ...any)) {
	for i := range b.writers {
		w := s.writers[i]
		if w.over {
			continue
		}
		if w.xid == 0 {
			n := s
			n.writers[i].xid, n.next = s.next, s.next+1
			to(n, "writer %d: gets transaction id %d", i, s.next)
			continue
		}
		for key := uint8(0); key < uint8(b.keys); key++ {
			if int(w.rows) == b.rowsEach || int(s.assigned) == b.rows || !broken.lockAfterInsert && s.locked(i, key) {
				continue
			}
			n := s
			n.assigned++
			n.rows[n.assigned] = modelRow{writer: uint8(i), key: key, slot: s.slot, there: true}
			n.writers[i].rows++
			n.writers[i].locks |= 1 << key
			to(n, "writer %d: inserts row %d of key %d into slot %d", i, n.assigned, key, s.slot)
		}
		n := s
		n.writers[i].over = true
		n.end(w.xid)
		n.settle(i, true)
		to(n, "writer %d: commits", i)
		if int(s.aborts) < b.aborts {
			n := s
			n.aborts++
			n.writers[i].over, n.writers[i].aborted = true, true
			n.end(w.xid)
			n.settle(i, false)
			to(n, "writer %d: rolls back", i)
		}
	}
}

func (s *ticksState) locked(writer int, key uint8) bool {
	for i, w := range s.writers {
		if i != writer && !w.over && w.locks&(1<<key) != 0 {
			return true
		}
	}
	return false
}

func (s *ticksState) settle(writer int, committed bool) {
	for n := 1; n <= int(s.assigned); n++ {
		if r := &s.rows[n]; r.writer == uint8(writer) {
			r.committed, r.there = committed, committed && r.there
		}
	}
}

func (b ticksBounds) readerSteps(s ticksState, broken ticksBreak, to func(ticksState, string, ...any)) {
	n := s
	switch {
	case !s.running && !s.beginning:
		n.beginning, n.read = true, s.assigned
		to(n, "relay: reads the sequence, %d", s.assigned)
		return
	case s.beginning:
		n.beginning, n.running, n.readSafe = false, true, s.read
		n.end(s.next)
		n.next++
		n.at = s.stored
		n.mark = [2]uint8{s.stored.from.xmax, s.stored.from.seqLast}
		to(n, "relay: takes the lease in transaction %d", s.next)
	case s.polled == 0:
		n.polled, n.snapshot, n.polledSafe = 1, s.take(), s.readSafe
		for i := 1; i <= int(s.assigned); i++ {
			if s.rows[i].there && s.rows[i].committed {
				n.visible |= 1 << i
			}
		}
		to(n, "relay: polls, snapshot %d:%d open %b", n.snapshot.xmin, n.snapshot.xmax, n.snapshot.xip)
	case s.polled == 1:
		n.polled, n.polledLast = 2, s.assigned
		to(n, "relay: its statement reads the sequence, %d", s.assigned)
	default:
		n.readPage(b, broken)
		to(n, "relay: publishes the page; behind it snapshot %d:%d, divided at %d, floor %d", n.at.from.xmin, n.at.from.xmax, n.at.from.seqLast, n.at.floor)
	}
	if s.unpublished != 0 {
		n := s
		n.unpublished = 0
		for i := 1; i <= int(s.assigned); i++ {
			if s.unpublished&(1<<i) != 0 {
				n.publish([]int{i})
			}
		}
		to(n, "relay: the page is acknowledged")
	}
	if s.running && s.storeXid == 0 && int(s.stores) < b.stores && s.at != s.stored {
		n := s
		n.stores++
		n.storeXid, n.next, n.storeRead, n.storing = s.next, s.next+1, s.read, s.at
		to(n, "relay: writes progress in transaction %d", s.next)
	}
	if int(s.crashes) < b.crashes {
		n := s
		n.forgetReader()
		n.crashes++
		to(n, "relay: crashes")
	}
}

func (b ticksBounds) storeSteps(s ticksState, to func(ticksState, string, ...any)) {
	if s.storeXid == 0 {
		return
	}
	n := s
	n.end(s.storeXid)
	n.stored, n.storeXid = s.storing, 0
	if s.running { // a relay that crashed does not hear of it
		n.readSafe = s.storeRead
	}
	n.storing, n.storeRead = modelCursor{}, 0
	to(n, "progress is committed")
}

func (b ticksBounds) slotSteps(s ticksState, broken ticksBreak, to func(ticksState, string, ...any)) {
	if int(s.turns) < b.turns {
		n := s
		n.turns++
		n.slot = 1 - s.slot
		to(n, "relay: turns to slot %d", n.slot)
	}
	if b.turns == 0 {
		return
	}
	away := 1 - s.slot
	found := false
	for i := 1; i <= int(s.assigned); i++ {
		r := s.rows[i]
		if r.slot != away || !r.there {
			continue
		}
		if !r.committed {
			if !broken.truncateUnheld { // its writer has a lock on the slot
				return
			}
			found = true
			continue
		}
		if x, tick := s.xid(i), s.stored.from; x >= tick.xmax || tick.xip&(1<<x) != 0 && !broken.truncateXip {
			return // unpublishedSQL finds it
		}
		found = true
	}
	if !found {
		return
	}
	n := s
	for i := 1; i <= int(s.assigned); i++ {
		if r := &n.rows[i]; r.slot == away && r.there {
			r.there = false
			if !r.published {
				n.wrong = wrongTruncated
			}
		}
	}
	to(n, "relay: truncates slot %d", away)
}

// behind returns a row that counts as published and is not.
func (s *ticksState) behind(c modelCursor) int {
	for i := 1; i <= int(s.assigned); i++ {
		r, xid, n := s.rows[i], s.xid(i), uint8(i)
		if !r.committed || !r.there || r.published {
			continue
		}
		if c.from.sees(xid) || c.more && c.to.sees(xid) && n <= c.seq || n <= c.floor {
			return i
		}
	}
	return 0
}

func (s *ticksState) check() error {
	switch s.wrong {
	case wrongOrder:
		return fmt.Errorf("%w: a row was published before an earlier one of its key", errModel)
	case wrongTwice:
		return fmt.Errorf("%w: a row was published twice without a crash", errModel)
	case wrongTruncated:
		return fmt.Errorf("%w: a row was truncated unpublished", errModel)
	}
	if n := s.behind(s.stored); n != 0 {
		return fmt.Errorf("%w: row %d is behind stored progress, unpublished", errModel, n)
	}
	if n := s.behind(s.at); n != 0 && s.unpublished&(1<<n) == 0 {
		return fmt.Errorf("%w: row %d is skipped", errModel, n)
	}
	for i := 1; i <= int(s.assigned); i++ {
		for _, t := range []modelTick{s.at.from, s.at.to, s.stored.from} {
			if t.xmax > 1 && uint8(i) <= t.seqLast && s.xid(i) >= t.xmax {
				return fmt.Errorf("%w: row %d is up to seq_last, and its transaction %d is not below xmax %d", errModel, i, s.xid(i), t.xmax)
			}
		}
	}
	return nil
}
