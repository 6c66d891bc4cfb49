package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

// tick is a snapshot that bounds a batch.
type tick struct {
	id       int64  // in outbox_ticks; 0: the beginning
	token    string // names it on every timeline: another one may have its number and its snapshot; empty: not stored yet
	snapshot string // xmin:xmax:xip,…  as PostgreSQL writes it
	// seqLast divides the rows: every row up to it has a transaction id below the snapshot's xmax,
	// so its transaction has ended in the snapshot, or is in xip: see passing.
	seqLast int64
	// The snapshot's parts. xip stays text: it is only sent back.
	xmin, xmax uint64
	xip        []string
	run        string // of the server that took it; empty if it was loaded
}

// ref returns the number and the token of a tick that has been stored; nil: there is no tick.
func (t *tick) ref() (id *int64, token *string) {
	if t == nil {
		return nil, nil
	}
	return &t.id, &t.token
}

// newTick reads a snapshot exactly as PostgreSQL writes it: a text that is read differently here and
// there would make a batch of other rows.
func newTick(snapshot string, seqLast int64) (*tick, error) {
	refuse := func() (*tick, error) { return nil, fmt.Errorf("snapshot %.100q: want xmin:xmax:xip,…", snapshot) }
	parts := strings.Split(snapshot, ":")
	if len(parts) != 3 {
		return refuse()
	}
	xmin, first := parseXID(parts[0])
	xmax, second := parseXID(parts[1])
	if !first || !second || xmin == 0 || xmax < xmin {
		return refuse()
	}
	t := &tick{snapshot: snapshot, seqLast: seqLast, xmin: xmin, xmax: xmax, xip: []string{}}
	if parts[2] == "" {
		return t, nil
	}
	t.xip = strings.Split(parts[2], ",")
	next := xmin
	for _, text := range t.xip {
		id, ok := parseXID(text)
		if !ok || id < next || id >= xmax {
			return refuse()
		}
		next = id + 1
	}
	return t, nil
}

// parseXID reads a transaction id without a sign, leading zeros or anything behind it.
func parseXID(text string) (id uint64, ok bool) {
	id, err := strconv.ParseUint(text, 10, 63)
	return id, err == nil && (text[0] != '0' || text == "0") && text[0] != '+'
}

func (r *Relay) loadTick(ctx context.Context, run string, id int64) (*tick, error) {
	var snapshot, token string
	var seqLast int64
	if err := r.pool.QueryRow(ctx, r.sql.of(loadTickSQL), run, id).Scan(&snapshot, &seqLast, &token); err != nil {
		return nil, fmt.Errorf("load tick %d: %w", id, err)
	}
	t, err := newTick(snapshot, seqLast)
	if err != nil {
		return nil, err
	}
	t.id, t.token = id, token
	return t, nil
}

// storeTick makes sure that a tick has a number. A tick that no progress refers to does no harm.
func (r *Relay) storeTick(ctx context.Context, db execer, t *tick) error {
	if t == nil || t.token != "" {
		return nil
	}
	err := db.QueryRow(ctx, r.sql.of(storeTickSQL), t.snapshot, t.seqLast, t.run).Scan(&t.id, &t.token)
	if errors.Is(err, pgx.ErrNoRows) {
		return errAnotherRun
	}
	if err != nil {
		return fmt.Errorf("store tick: %w", err)
	}
	return nil
}

// cursor is a place in the stream of rows. Everything visible in from is behind it. While a batch
// takes several pages (to is set), everything visible in to up to seq is also behind it.
type cursor struct {
	from *tick
	to   *tick
	seq  int64
	// floor: everything that can ever appear up to this seq is behind the cursor.
	floor int64
}

// next returns the cursor behind a page that was read at c. A full page leaves the rest of its
// batch; seen is the tick that the statement returned.
func (c cursor) next(p *page, seen *tick) cursor {
	end := cmp.Or(c.to, seen)
	if p.full {
		return cursor{from: c.from, to: end, seq: p.rows[len(p.rows)-1].seq, floor: c.floor}
	}
	return cursor{from: end, floor: c.floor}
}

// floorMark remembers a tick until every transaction that was open in it has ended. Then everything
// up to the tick's seqLast that will ever be visible is visible.
type floorMark struct {
	xmax    uint64
	seqLast int64
}

// advance is called with each tick whose batch is complete, and returns the new floor.
func (m *floorMark) advance(t *tick, floor int64) int64 {
	if t.xmin < m.xmax {
		return floor
	}
	floor = max(floor, m.seqLast)
	*m = floorMark{xmax: t.xmax, seqLast: t.seqLast}
	return floor
}
