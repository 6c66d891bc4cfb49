package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// Reason is why a row is in outbox_dead.
type Reason string

// The reasons, as stored in the column.
const (
	ReasonUnknownTopic Reason = "unknown_topic" // the topic does not exist; released automatically when it does
	// ReasonNotAuthorized: the relay may not describe the topic or write to it; released
	// automatically when it may.
	ReasonNotAuthorized Reason = "not_authorized"
	ReasonTooLarge      Reason = "too_large"   // larger than the topic's max.message.bytes
	ReasonRefused       Reason = "refused"     // refused by Kafka for another reason
	ReasonBadHeaders    Reason = "bad_headers" // the headers column is not in the documented form
	// ReasonBadPartition: the row requests a partition that its topic does not have, or a value
	// that is not a number.
	ReasonBadPartition Reason = "bad_partition"
	ReasonPaused       Reason = "paused" // an operator paused the topic; released automatically when it is resumed
	ReasonBehind       Reason = "behind" // nothing is wrong: an earlier row of the key is dead
)

// ofRow reports whether the row itself is wrong, and no other row waits for the same cause. The
// statements that look for what holds a key have the same list.
func (r Reason) ofRow() bool {
	return r == ReasonTooLarge || r == ReasonRefused || r == ReasonBadHeaders || r == ReasonBadPartition
}

const (
	releaseRowsMax = 500                   // rows of one round
	releaseMax     = 20 * time.Millisecond // time of rounds before a page of the outbox is published
)

// deadRows are the rows of the shard in outbox_dead. Only the worker of the shard adds to them;
// operators release and discard them. deadLook finds rows that may leave, concurrently with the
// worker.
type deadRows struct {
	*publisher
	look      *deadLook
	releasing bool  // there are more rows to publish
	after     int64 // where the last page of dead rows ended: see releasableSQL
	limit     int   // rows of the next page of dead rows
	deadAdded int   // rows that became dead since the last release
	last      int64 // the largest seq that a dead row of any shard had when the work began
}

// release publishes dead rows that may leave, in their order, together with the rows behind them.
// If there are many, pages of the outbox, with the rows of other topics, alternate with them. Each
// turn publishes more dead rows than a page has added behind them, so releasing finishes.
func (p *publisher) release(work, ctx context.Context) error {
	d := p.dead
	if !d.releasing && !d.look.found.Swap(false) {
		return nil
	}
	begun, want := time.Now(), 2*d.deadAdded
	d.releasing, d.deadAdded = true, 0
	for published := 0; published < want || time.Since(begun) < releaseMax; {
		n, more, err := p.releaseSome(work, ctx)
		if err != nil {
			return err
		}
		if !more {
			d.releasing, d.after = false, 0
			return nil
		}
		published += n
	}
	return nil
}

// releaseSome publishes one page of dead rows that may leave. Nothing else is in flight during
// that, so the rows of a key cannot overtake each other.
func (p *publisher) releaseSome(work, ctx context.Context) (published int, more bool, err error) {
	page, err := p.dead.page(ctx)
	if err != nil || !page.any {
		return 0, false, err
	}
	a, err := p.tryReleased(ctx, &page.page)
	if err != nil {
		return 0, false, err
	}
	if err := p.dead.remove(ctx, seqs(a.dropped), page.discarded); err != nil {
		return 0, false, err
	}
	if len(page.rows) > 0 {
		if err := p.flight.settled(ctx); err != nil {
			return 0, false, err
		}
		if !p.lease.held() {
			return 0, false, errLeaseLost
		}
		if err := p.target.publish(work, ctx, a); err != nil {
			return 0, false, err
		}
		published = len(a.rows) + len(a.dropped)
	}
	p.dead.after = page.end
	return published + len(page.discarded), true, nil
}

// deadPage is a page of dead rows that may leave.
type deadPage struct {
	page
	any       bool    // a key was checked
	discarded []int64 // rows that are not published
	end       int64
}

// page reads dead rows that may leave, as readPage reads rows of the outbox.
func (d *deadRows) page(ctx context.Context) (*deadPage, error) {
	limit := d.care(true).limit(min(d.limit, releaseRowsMax))
	page := &deadPage{end: d.after}
	err := d.ask(ctx, func(rows pgx.Rows) error { return page.read(rows, d.flight.bytesMax/4) },
		d.sql.of(releasableSQL), d.cfg.Name, d.after, limit, d.lease.shards, d.lease.shard, d.cfg.SkipDead)
	if err != nil {
		return nil, err
	}
	d.limit = nextLimit(d.limit, &page.page, d.flight.bytesMax, d.cfg.PageRowsMax)
	return page, nil
}

// read takes rows until bytesMax is passed. Later pages read the rest: of a key that was cut, the row
// behind the cut gets the state retry, and the keys after it are behind the page's end.
func (p *deadPage) read(rows pgx.Rows, bytesMax int) error {
	defer rows.Close()
	before := int64(math.MinInt64) // the row before, of the same key
	drops := false                 // a row of the key is discarded: those behind it follow when it is gone
	for p.bytes <= bytesMax && rows.Next() {
		at, r := int64(0), row{}
		var seq *int64 // null: nothing of the key may leave
		var id pgtype.UUID
		var created *time.Time
		var state string
		if err := rows.Scan(&at, &seq, &id, &r.topic, &r.key, &r.payload, &r.headers, &created, &r.was, &state); err != nil {
			return err
		}
		if at < p.end {
			return errNoOrder
		}
		if at > p.end {
			p.any, p.end, before, drops = true, at, math.MinInt64, false
		}
		if seq == nil {
			continue
		}
		if *seq <= before {
			return errNoOrder
		}
		if before = *seq; state == "discard" {
			p.discarded, drops = append(p.discarded, *seq), true
		}
		if drops {
			continue
		}
		r.seq, r.id, r.created = *seq, id.Bytes, *created
		p.rows, p.bytes = append(p.rows, r), p.bytes+r.bytes()
	}
	slices.SortFunc(p.rows, func(a, b row) int { return cmp.Compare(a.seq, b.seq) }) // in the order of insert, across keys
	return rows.Err()
}

// behind returns the keys of a page that already have a dead row, for attempt.behind. It looks up
// only rows of topics that may have dead rows.
func (d *deadRows) behind(ctx context.Context, rows []row) (map[topicKey]int64, error) {
	found := map[topicKey]int64{}
	dead := d.look.topicsNow()
	if len(dead) == 0 {
		return found, nil
	}
	var names []string
	var keys [][]byte
	for i := range rows {
		if rows[i].key != nil && dead[rows[i].topic] {
			names, keys = append(names, rows[i].topic), append(keys, rows[i].key)
		}
	}
	if len(names) == 0 {
		return found, nil
	}
	var at []int
	err := d.ask(ctx, all(&at), d.sql.of(holdingSQL), d.cfg.Name, names, keys, d.cfg.SkipDead)
	for _, i := range at {
		found[topicKey{names[i-1], string(keys[i-1])}] = ofEarlierPage
	}
	return found, err
}

// notOwned returns the rows of a page that are not in outbox_dead. Rows that are there are read again
// where progress went back: in another cluster, and after a change of the number of shards.
func (d *deadRows) notOwned(ctx context.Context, rows []row) ([]row, error) {
	var numbers []int64
	var ids [][16]byte
	var places []int
	for i := range rows {
		if rows[i].seq <= d.last {
			numbers, ids, places = append(numbers, rows[i].seq), append(ids, rows[i].id), append(places, i)
		}
	}
	if len(numbers) == 0 {
		return rows, nil
	}
	var at []int
	err := d.ask(ctx, all(&at), d.sql.of(ownedSQL), d.cfg.Name, numbers, ids)
	if err != nil || len(at) == 0 {
		return rows, err
	}
	owned := map[int]bool{}
	for _, i := range at {
		owned[places[i-1]] = true
	}
	var others []row
	for i := range rows {
		if !owned[i] {
			others = append(others, rows[i])
		}
	}
	return others, nil
}

// one reads the value that a statement returns, and all reads those of its rows.
func one[T any](into *T) func(pgx.Rows) error {
	return func(rows pgx.Rows) (err error) { *into, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[T]); return err }
}

func all[T any](into *[]T) func(pgx.Rows) error {
	return func(rows pgx.Rows) (err error) { *into, err = pgx.CollectRows(rows, pgx.RowTo[T]); return err }
}

// ask sends a statement on dead rows after its settings, in one round trip and one transaction. The
// settings end with the transaction. It returns errAnotherRun if the connection leads to another
// server than that of the lease: dead rows there are not valid for this lease.
func (d *deadRows) ask(ctx context.Context, read func(pgx.Rows) error, sql string, args ...any) error {
	defer d.expect(d.patience)()
	return d.look.ask(ctx, read, sql, args...)
}

// ask is deadRows.ask without a sign of life: these polls say nothing about the worker.
func (l *deadLook) ask(ctx context.Context, read func(pgx.Rows) error, sql string, args ...any) error {
	p := l.publisher
	ctx, cancel := context.WithTimeoutCause(ctx, p.patience, errNoAnswer)
	defer cancel()
	batch := &pgx.Batch{}
	batch.Queue(p.sql.of(deadSettingsSQL), p.lease.cluster.run)
	batch.Queue(sql, args...)
	results := p.pool.SendBatch(ctx, batch)
	same := false
	settings, err := results.Query()
	if err == nil {
		same, err = pgx.CollectExactlyOneRow(settings, func(row pgx.CollectableRow) (bool, error) { return row.RawValues()[0][0] == 1, nil })
	}
	if err == nil && !same {
		err = errAnotherRun
	}
	if err == nil {
		var rows pgx.Rows
		if rows, err = results.Query(); err == nil {
			err = read(rows)
			rows.Close()
			err = errors.Join(err, rows.Err())
		}
	}
	if err = errors.Join(err, results.Close()); err != nil {
		return fmt.Errorf("read or change dead rows: %w", silence(ctx, err))
	}
	return nil
}

// moveToDead moves rows to outbox_dead and progress past them, in one transaction. Everything
// before end is acknowledged. With ExactlyOnce see toTransactions.
func (p *publisher) moveToDead(ctx context.Context, dead []deadRow, end cursor) error {
	ctx, cancel := p.patient(ctx)
	defer cancel()
	p.progress.storing.Lock()
	defer p.progress.storing.Unlock()
	_, rows := p.flight.takeProgress()
	if err := p.progress.ticks(ctx, end); err != nil {
		return err
	}
	if err := p.storeDead(ctx, columns(dead), end, rows, nil); err != nil {
		return err
	}
	p.dead.moved(ctx, dead)
	return nil
}

// storeDead stores progress together with the dead rows up to there, all or nothing. A row in
// outbox_dead must be behind the cursor; otherwise it would also be read from the outbox. A holder
// that lost its shard adds no dead rows, because of the chain.
func (p *publisher) storeDead(ctx context.Context, dead verdicts, end cursor, rows int64, journal *int64) error {
	err := p.transact(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, p.sql.of(deadSettingsSQL), p.lease.cluster.run); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, p.sql.of(moveToDeadSQL), p.cfg.Name, dead.seqs, dead.reasons, dead.errs, dead.waits, dead.state); err != nil {
			return err
		}
		return p.progress.insert(ctx, tx, end, rows, journal)
	})
	if err != nil {
		return fmt.Errorf("move %d rows to outbox_dead: %w", len(dead.seqs), err)
	}
	p.progress.committed(end, rows)
	return nil
}

// moved notes the rows that are now in outbox_dead. It logs the first row of a topic and reason,
// and then the number of rows.
func (d *deadRows) moved(ctx context.Context, dead []deadRow) {
	d.look.moved(dead)
	d.deadAdded += len(dead)
	for _, row := range dead {
		if d.cfg.Hooks.Dead != nil {
			d.cfg.Hooks.Dead(row.row.topic, row.reason)
		}
		if row.reason != ReasonBehind && row.reason != ReasonPaused && row.reason != ReasonNotAuthorized {
			d.say.about(ctx, row.row.topic+" "+string(row.reason), "outbox row cannot be published; it moved to outbox_dead",
				"relay", d.cfg.Name, "holds_key", row.row.key != nil && (!d.cfg.SkipDead || !row.reason.ofRow()), "seq", row.row.seq, "id", row.row.id,
				"topic", row.row.topic, "reason", row.reason, "error", row.err)
		}
	}
}

// verdicts are dead rows in the form of statement parameters.
type verdicts struct {
	state                string // of those that are not behind another one
	seqs                 []int64
	reasons, errs, waits []string
}

func (v *verdicts) add(seq int64, reason Reason, err, waitsFor string) {
	v.seqs, v.reasons, v.errs, v.waits = append(v.seqs, seq), append(v.reasons, string(reason)), append(v.errs, err), append(v.waits, waitsFor)
}

func columns(dead []deadRow) (v verdicts) {
	v.state = "held"
	for _, d := range dead {
		v.add(d.row.seq, d.reason, d.err, d.waitsFor)
	}
	return v
}

func seqs(rows []*row) []int64 {
	all := make([]int64, len(rows))
	for i, r := range rows {
		all[i] = r.seq
	}
	return all
}

// published removes released rows that were published, and holds those again that still cannot be.
func (d *deadRows) published(ctx context.Context, a *attempt) error {
	if len(a.rows) > 0 {
		if err := d.remove(ctx, seqs(a.rows), nil); err != nil {
			return err
		}
		d.cfg.Logger.InfoContext(ctx, "dead rows were published", "relay", d.cfg.Name, "rows", len(a.rows))
	}
	return d.holdAgain(ctx, a.dead)
}

// remove deletes rows that were published, and sets aside discarded ones.
func (d *deadRows) remove(ctx context.Context, published, discarded []int64) error {
	if len(published)+len(discarded) == 0 {
		return nil
	}
	return d.change(ctx, d.sql.of(removeDeadSQL()), published, discarded)
}

// change executes a statement that depends on the lease.
func (d *deadRows) change(ctx context.Context, sql string, args ...any) error {
	mine := false
	err := d.ask(ctx, one(&mine), sql, append([]any{d.cfg.Name, d.lease.shard, d.lease.epoch, d.lease.cluster.run, d.cfg.SkipDead}, args...)...)
	if err == nil && !mine {
		err = errLeaseLost
	}
	return err
}

// holdAgain stores why released rows still cannot be published.
func (d *deadRows) holdAgain(ctx context.Context, dead []deadRow) error {
	// A row that is only behind keeps its state; it moves when the row before it does.
	again := slices.DeleteFunc(slices.Clone(dead), func(d deadRow) bool { return d.reason == ReasonBehind })
	if len(again) == 0 {
		return nil
	}
	v := columns(again)
	return d.change(ctx, d.sql.of(holdAgainSQL()), v.seqs, v.reasons, v.errs, v.waits)
}
