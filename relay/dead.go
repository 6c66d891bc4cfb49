package relay

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// Reason says why a row is in outbox_dead.
type Reason string

// The reasons, as they stand in the column.
const (
	ReasonUnknownTopic Reason = "unknown_topic" // the topic does not exist; released by itself when it does
	// ReasonNotAuthorized is a topic that the relay may not describe or write to; released by itself when it may.
	ReasonNotAuthorized Reason = "not_authorized"
	ReasonTooLarge      Reason = "too_large"   // larger than the topic's max.message.bytes
	ReasonRefused       Reason = "refused"     // refused by Kafka for another reason
	ReasonBadHeaders    Reason = "bad_headers" // the headers column is not in the documented form
	// ReasonBadPartition is a row that asks for a partition that its topic does not have, or for what is no number.
	ReasonBadPartition Reason = "bad_partition"
	ReasonPaused       Reason = "paused" // an operator paused the topic; released by itself when it is resumed
	ReasonBehind       Reason = "behind" // nothing is wrong: an earlier row of the key is dead
)

// ofRow is true where it is the row that is wrong, and no other row waits for the same thing. The statements that
// look for what holds a key have the same list.
func (r Reason) ofRow() bool {
	return r == ReasonTooLarge || r == ReasonRefused || r == ReasonBadHeaders || r == ReasonBadPartition
}

// deadEvery is how often dead rows are looked at: whether their topic exists by now, or an operator
// released them.
const deadEvery = time.Second

const (
	releaseRowsMax = 500                    // of one round
	releaseMax     = 200 * time.Millisecond // of rounds before the outbox has its turn
)

// deadRows are the rows of the shard in outbox_dead. Only the worker of the shard adds to them; operators release and
// discard them.
type deadRows struct {
	*publisher
	exist     bool      // there may be some
	looked    time.Time // when they were looked at last
	releasing bool      // there were more to publish
	limit     int       // rows of the next page of them
	laid      int       // rows that became dead since
}

// due tells whether released rows are to be looked for now.
func (d *deadRows) due(ctx context.Context) (bool, error) {
	if !d.exist {
		return false, nil
	}
	if time.Since(d.looked) < deadEvery {
		return d.releasing, nil
	}
	d.looked = time.Now()
	return true, d.retryTopics(ctx)
}

// release publishes dead rows whose topic exists by now or that were set to retry, in their order,
// together with what stands behind them. Where they are many the pages of the outbox, with the rows of other topics, take
// turns with them. Meanwhile each turn publishes more of them than a page has put behind them: they come to an end.
func (p *publisher) release(work, ctx context.Context) error {
	d := p.dead
	if due, err := d.due(ctx); err != nil || !due {
		return err
	}
	begun, want := time.Now(), 2*d.laid
	d.releasing, d.laid = true, 0
	for published := 0; published < want || time.Since(begun) < releaseMax; {
		n, more, err := p.releaseSome(work, ctx)
		if err != nil {
			return err
		}
		if !more {
			d.releasing = false
			return d.look(ctx)
		}
		published += n
	}
	return nil
}

// releaseSome publishes one page of released rows. Nothing else is in flight meanwhile, so the rows of a key cannot
// overtake each other.
func (p *publisher) releaseSome(work, ctx context.Context) (published int, more bool, err error) {
	page, err := p.dead.page(ctx)
	if err != nil || len(page.rows) == 0 {
		return 0, false, err
	}
	a, err := p.tryReleased(ctx, page)
	if err != nil {
		return 0, false, err
	}
	if err := p.dead.remove(ctx, seqs(a.dropped)); err != nil {
		return 0, false, err
	}
	if err := p.flight.settled(ctx); err != nil {
		return 0, false, err
	}
	if !p.lease.held() {
		return 0, false, errLeaseLost
	}
	return len(a.rows) + len(a.dropped), page.full, p.target.publish(work, ctx, a)
}

func (d *deadRows) look(ctx context.Context) error {
	ctx, cancel := d.patient(ctx)
	defer cancel()
	if err := d.pool.QueryRow(ctx, d.sql.deadExist, d.cfg.Name, d.lease.shards, d.lease.shard).Scan(&d.exist); err != nil {
		return fmt.Errorf("look for dead rows: %w", silence(ctx, err))
	}
	return nil
}

// retryTopics releases rows that waited for a topic which is there now, or is not paused any more.
func (d *deadRows) retryTopics(ctx context.Context) error {
	ctx, cancel := d.patient(ctx)
	defer cancel()
	result, err := d.pool.Query(ctx, d.sql.waitingTopics, d.cfg.Name)
	if err != nil {
		return fmt.Errorf("look for dead rows: %w", err)
	}
	var missing, ready, rated []string
	var name string
	var paused bool
	_, err = pgx.ForEachRow(result, []any{&name, &paused}, func() error {
		switch {
		case d.lease.obeys.set.Load().has(name):
		case paused && d.cfg.Rates[name] > 0:
			rated = append(rated, name)
		case paused:
			ready = append(ready, name)
		default:
			missing = append(missing, name)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("look for dead rows: %w", err)
	}
	d.noneWait(rated)
	for _, name := range rated {
		if _, err := d.retryRated(ctx, name); err != nil {
			return fmt.Errorf("hand back rows of topic %q: %w", name, err)
		}
	}
	var names []string
	for _, name := range missing {
		names = append(names, d.routes.names(name)...)
	}
	if len(names) > 0 {
		if err := d.learn(ctx, names); err != nil {
			return err
		}
	}
	for _, name := range missing {
		if d.topics.released(name, d.routes.names(name)) {
			ready = append(ready, name)
		}
	}
	if len(ready) == 0 {
		return nil
	}
	_, err = d.pool.Exec(ctx, d.sql.retryTopic, d.cfg.Name, ready)
	return err
}

// page reads released rows, as readPage does rows of the outbox.
func (d *deadRows) page(ctx context.Context) (*page, error) {
	ctx, cancel := d.patient(ctx)
	defer cancel()
	limit := min(d.limit, releaseRowsMax)
	result, err := d.pool.Query(ctx, d.sql.releasable, d.cfg.Name, limit, d.lease.shards, d.lease.shard, d.cfg.SkipDead)
	if err != nil {
		return nil, fmt.Errorf("read dead rows: %w", silence(ctx, err))
	}
	defer result.Close()
	page := &page{}
	for count := 1; result.Next(); count++ {
		page.full = count == limit
		if page.bytes > d.flight.bytesMax/4 {
			page.full = true
			break
		}
		var r row
		if err := result.Scan(&r.seq, (*[16]byte)(&r.id), &r.topic, &r.key, &r.payload, &r.headers, &r.created); err != nil {
			return nil, fmt.Errorf("read dead rows: %w", err)
		}
		page.rows = append(page.rows, r)
		page.bytes += r.bytes()
	}
	result.Close()
	if err := result.Err(); err != nil {
		return nil, fmt.Errorf("read dead rows: %w", silence(ctx, err))
	}
	d.limit = nextLimit(d.limit, page, d.flight.bytesMax, d.cfg.PageRowsMax)
	return page, nil
}

// behind returns the keys of a page that have a dead row already.
func (d *deadRows) behind(ctx context.Context, rows []row) (map[topicKey]bool, error) {
	found := map[topicKey]bool{}
	if !d.exist {
		return found, nil
	}
	names, keys := make([]string, len(rows)), make([][]byte, len(rows))
	for i := range rows {
		names[i], keys[i] = rows[i].topic, rows[i].key
	}
	ctx, cancel := d.patient(ctx)
	defer cancel()
	result, err := d.pool.Query(ctx, d.sql.held, d.cfg.Name, names, keys, d.cfg.SkipDead)
	if err != nil {
		return nil, fmt.Errorf("look for dead keys: %w", silence(ctx, err))
	}
	places, err := pgx.CollectRows(result, pgx.RowTo[int])
	if err != nil {
		return nil, fmt.Errorf("look for dead keys: %w", silence(ctx, err))
	}
	for _, place := range places {
		found[keyOf(&rows[place-1])] = true
	}
	return found, nil
}

// moveToDead moves rows to outbox_dead and progress past them, in one transaction. Everything before end is acknowledged.
// With ExactlyOnce see toTransactions.
func (p *publisher) moveToDead(ctx context.Context, dead []deadRow, end cursor) error {
	ctx, cancel := p.patient(ctx)
	defer cancel()
	p.progress.storing.Lock()
	defer p.progress.storing.Unlock()
	_, rows := p.flight.take()
	if err := p.progress.ticks(ctx, end); err != nil {
		return err
	}
	if err := p.storeDead(ctx, columns(dead), end, rows, nil); err != nil {
		return err
	}
	p.dead.moved(ctx, dead)
	return nil
}

// storeDead stores progress together with the dead rows up to there, all or nothing: a row in outbox_dead is behind
// the cursor, or it would be read again beside it, and a holder that lost its shard adds none, because of the chain.
func (p *publisher) storeDead(ctx context.Context, dead verdicts, end cursor, rows int64, journal *int64) error {
	var done advanced
	err := p.transact(ctx, func(tx pgx.Tx) (err error) {
		// The chain fences this release. A holder of the previous one only changed the epoch.
		if tag, err := tx.Exec(ctx, p.sql.lockLease, p.cfg.Name, p.lease.shard, p.lease.epoch); err != nil || tag.RowsAffected() == 0 {
			return cmp.Or(err, errLeaseLost)
		}
		if _, err := tx.Exec(ctx, p.sql.moveToDead, p.cfg.Name, dead.seqs, dead.reasons, dead.errs); err != nil {
			return err
		}
		done, err = p.progress.insert(ctx, tx, end, rows, journal)
		return err
	})
	if err != nil {
		return fmt.Errorf("move %d rows to outbox_dead: %w", len(dead.seqs), err)
	}
	p.progress.committed(done)
	return nil
}

// moved notes what is in outbox_dead now. The log has the first row of a topic and reason, and then how many there were.
func (d *deadRows) moved(ctx context.Context, dead []deadRow) {
	d.forgetRefusals(dead)
	d.exist = d.exist || len(dead) > 0
	d.laid += len(dead)
	for _, row := range dead {
		if d.cfg.Hooks.Dead != nil {
			d.cfg.Hooks.Dead(row.row.topic, row.reason)
		}
		if row.reason != ReasonBehind && row.reason != ReasonPaused && row.reason != ReasonNotAuthorized {
			d.say.about(ctx, slog.LevelError, row.row.topic+" "+string(row.reason), "outbox row cannot be published; it moved to outbox_dead",
				"relay", d.cfg.Name, "holds_key", row.row.key != nil && (!d.cfg.SkipDead || !row.reason.ofRow()), "seq", row.row.seq, "id", row.row.id,
				"topic", row.row.topic, "reason", row.reason, "error", row.err)
		}
	}
}

// verdicts are dead rows as statements take them.
type verdicts struct {
	seqs          []int64
	reasons, errs []string
}

func (v *verdicts) add(seq int64, reason Reason, err string) {
	v.seqs, v.reasons, v.errs = append(v.seqs, seq), append(v.reasons, string(reason)), append(v.errs, err)
}

func columns(dead []deadRow) (v verdicts) {
	for _, d := range dead {
		v.add(d.row.seq, d.reason, d.err)
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

// published removes released rows that were published, and holds again what still cannot be.
func (d *deadRows) published(ctx context.Context, a *attempt) error {
	if len(a.rows) > 0 {
		if err := d.remove(ctx, seqs(a.rows)); err != nil {
			return err
		}
		d.cfg.Logger.InfoContext(ctx, "dead rows were published", "relay", d.cfg.Name, "rows", len(a.rows))
	}
	return d.holdAgain(ctx, a.dead)
}

// remove deletes rows that were published.
func (d *deadRows) remove(ctx context.Context, seqs []int64) error {
	if len(seqs) == 0 {
		return nil
	}
	ctx, cancel := d.patient(ctx)
	defer cancel()
	var mine bool
	if err := d.pool.QueryRow(ctx, d.sql.removeDead, d.cfg.Name, d.lease.shard, d.lease.epoch, seqs).Scan(&mine); err != nil {
		return fmt.Errorf("remove released rows: %w", silence(ctx, err))
	}
	if !mine {
		return errLeaseLost
	}
	return nil
}

// holdAgain stores why released rows still cannot be published.
func (d *deadRows) holdAgain(ctx context.Context, dead []deadRow) error {
	// A row that is only behind keeps its state; it moves when the row before it does.
	again := slices.DeleteFunc(slices.Clone(dead), func(d deadRow) bool { return d.reason == ReasonBehind })
	if len(again) == 0 {
		return nil
	}
	ctx, cancel := d.patient(ctx)
	defer cancel()
	v := columns(again)
	var mine bool
	if err := d.pool.QueryRow(ctx, d.sql.holdAgain, d.cfg.Name, d.lease.shard, d.lease.epoch, v.seqs, v.reasons, v.errs).Scan(&mine); err != nil {
		return fmt.Errorf("hold dead rows again: %w", silence(ctx, err))
	}
	if !mine {
		return errLeaseLost
	}
	d.forgetRefusals(again)
	return nil
}
