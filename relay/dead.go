package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/outbox"
)

// Reason says why a row is in outbox_dead.
type Reason string

// The reasons, as they stand in the column.
const (
	ReasonUnknownTopic Reason = "unknown_topic" // the topic does not exist; released by itself when it does
	ReasonTooLarge     Reason = "too_large"     // larger than the topic's max.message.bytes
	ReasonRefused      Reason = "refused"       // refused by Kafka for another reason
	ReasonBadHeaders   Reason = "bad_headers"   // the headers column is not in the documented form
	ReasonPaused       Reason = "paused"        // an operator paused the topic; released by itself when it is resumed
	ReasonBehind       Reason = "behind"        // nothing is wrong: an earlier row of the key is dead
)

// deadRow is a verdict about a row.
type deadRow struct {
	row    *row
	reason Reason
	err    string
}

// deadEvery is how often dead rows are looked at: whether their topic exists by now, or an operator
// released them.
const deadEvery = time.Second

// sorted is a page, separated. rows and records are of one length.
type sorted struct {
	rows    []*row
	records []*kgo.Record
	dead    []deadRow
	behind  map[topicKey]bool // keys with a dead row that holds them
	skip    bool              // Config.SkipDead
}

// bury gives up a row and, with it, the rest of its key. A row without a key has no order to keep.
func (s *sorted) bury(r *row, reason Reason, err error) {
	s.dead = append(s.dead, deadRow{r, reason, bounds.ErrorText(err)})
	if r.key != nil && (!s.skip || !reason.ofRow()) {
		s.behind[keyOf(r)] = true
	}
}

// ofRow is true where it is the row that is wrong, and no other row waits for the same thing. The statements that
// look for what holds a key have the same list.
func (r Reason) ofRow() bool {
	return r == ReasonTooLarge || r == ReasonRefused || r == ReasonBadHeaders
}

var errPaused = errors.New("the topic is paused: its rows are published when it is resumed")

var errBehind = errors.New("an earlier row of this key is dead")

// sort separates the rows of a page that can be produced from those that cannot.
func (p *publisher) sort(ctx context.Context, rows []row) (*sorted, error) {
	if err := p.learnTopics(ctx, rows); err != nil {
		return nil, err
	}
	behind, err := p.behind(ctx, rows)
	if err != nil {
		return nil, err
	}
	s := &sorted{rows: make([]*row, 0, len(rows)), records: make([]*kgo.Record, 0, len(rows)), behind: behind, skip: p.cfg.SkipDead}
	maker := newRecordMaker(len(rows))
	for i := range rows {
		r := &rows[i]
		if r.key != nil && len(s.behind) > 0 && s.behind[keyOf(r)] {
			s.bury(r, ReasonBehind, errBehind)
			continue
		}
		record, reason, err := p.record(maker, r)
		if err != nil {
			s.bury(r, reason, err)
			continue
		}
		s.rows, s.records = append(s.rows, r), append(s.records, record)
	}
	return s, nil
}

type topicKey struct{ topic, key string }

func keyOf(r *row) topicKey { return topicKey{r.topic, string(r.key)} }

// record builds the record of a row, or says why Kafka would refuse it.
func (p *publisher) record(maker *recordMaker, r *row) (*kgo.Record, Reason, error) {
	headers, err := outbox.DecodeHeaders(r.headers)
	if err != nil {
		return nil, ReasonBadHeaders, err
	}
	if p.exact != nil {
		if err := p.refusal(r.seq); err != nil {
			return nil, ReasonRefused, err
		}
	}
	if p.isPaused(r.topic) {
		return nil, ReasonPaused, errPaused
	}
	topic, _ := p.topics.get(r.topic)
	if topic.refusal != nil {
		return nil, ReasonRefused, topic.refusal
	}
	if !topic.exists {
		return nil, ReasonUnknownTopic, fmt.Errorf("topic %q does not exist: create it, and the row is published by itself", r.topic)
	}
	message := outbox.Message{Key: r.key, Payload: r.payload, Headers: headers}
	if size := message.RecordBytes(); size > int(topic.maxBytes) {
		return nil, ReasonTooLarge, fmt.Errorf("the record has %d bytes, max.message.bytes of topic %q is %d: raise it and retry the row, or discard the row", size, r.topic, topic.maxBytes)
	}
	return maker.add(r, headers), "", nil
}

func (p *publisher) learnTopics(ctx context.Context, rows []row) error {
	var names []string
	asked := map[string]bool{}
	for i := range rows {
		name := rows[i].topic
		if asked[name] {
			continue
		}
		asked[name] = true
		if _, fresh := p.topics.get(name); !fresh {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	return p.learn(ctx, names)
}

// behind returns the keys of a page that have a dead row already.
func (p *publisher) behind(ctx context.Context, rows []row) (map[topicKey]bool, error) {
	found := map[topicKey]bool{}
	if !p.deadExist {
		return found, nil
	}
	names, keys := make([]string, len(rows)), make([][]byte, len(rows))
	for i := range rows {
		names[i], keys[i] = rows[i].topic, rows[i].key
	}
	ctx, cancel := p.patient(ctx)
	defer cancel()
	result, err := p.pool.Query(ctx, p.sql.held, p.cfg.Name, names, keys, p.cfg.SkipDead)
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

// bury moves rows to outbox_dead and progress past them, in one transaction. Everything before end is
// acknowledged. With ExactlyOnce see produceBesideDead.
func (p *publisher) bury(ctx context.Context, dead []deadRow, end cursor) error {
	ctx, cancel := p.patient(ctx)
	defer cancel()
	p.storing.Lock()
	defer p.storing.Unlock()
	_, rows := p.takeAcked()
	// Ticks are stored on their own: a rollback must not take back a number that the tick remembers.
	if err := errors.Join(p.store(ctx, p.pool, end.from), p.store(ctx, p.pool, end.to)); err != nil {
		return err
	}
	if err := p.storeBuried(ctx, columns(dead), end, rows); err != nil {
		return err
	}
	p.count(rows)
	p.buried(ctx, dead)
	return nil
}

// storeBuried is storeCursor together with the dead rows up to there, all or nothing: a row in outbox_dead is behind
// the cursor, or it would be read again beside it, and a holder that lost its shard adds none, because of the epoch.
func (p *publisher) storeBuried(ctx context.Context, dead verdicts, end cursor, rows int64) error {
	seq := p.seqRead.Load()
	err := p.transact(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, p.sql.bury, p.cfg.Name, dead.seqs, dead.reasons, dead.errs); err != nil {
			return err
		}
		return p.storeCursor(ctx, tx, end, rows)
	})
	if err != nil {
		return fmt.Errorf("move %d rows to outbox_dead: %w", len(dead.seqs), err)
	}
	p.seqSafe.Store(seq)
	return nil
}

func (p *publisher) buried(ctx context.Context, dead []deadRow) {
	p.forgetRefusals(dead)
	p.deadExist = p.deadExist || len(dead) > 0
	p.laid += len(dead)
	for _, d := range dead {
		if p.cfg.Hooks.Dead != nil {
			p.cfg.Hooks.Dead(d.row.topic, d.reason)
		}
		if d.reason != ReasonBehind && d.reason != ReasonPaused {
			p.cfg.Logger.ErrorContext(ctx, "outbox row cannot be published; it moved to outbox_dead",
				"relay", p.cfg.Name, "holds_key", d.row.key != nil && (!p.cfg.SkipDead || !d.reason.ofRow()), "seq", d.row.seq, "id", d.row.id, "topic", d.row.topic, "reason", d.reason, "error", d.err)
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

// reviveDead publishes dead rows whose topic exists by now or that were set to retry, in their order,
// together with what stands behind them. Where they are many the pages of the outbox, with the rows of other topics, take
// turns with them. Meanwhile each turn publishes more of them than a page has put behind them: they come to an end.
func (p *publisher) reviveDead(ctx context.Context) error {
	if !p.deadExist {
		return nil
	}
	if time.Since(p.looked) >= deadEvery {
		p.looked = time.Now()
		if err := p.retryTopics(ctx); err != nil {
			return err
		}
	} else if !p.reviving {
		return nil
	}
	begun, want := time.Now(), 2*p.laid
	p.reviving, p.laid = true, 0
	for published := 0; published < want || time.Since(begun) < reviveMax; {
		n, more, err := p.reviveSome(ctx)
		if err != nil {
			return err
		}
		if !more {
			p.reviving = false
			return p.lookForDead(ctx)
		}
		published += n
	}
	return nil
}

func (p *publisher) lookForDead(ctx context.Context) error {
	ctx, cancel := p.patient(ctx)
	defer cancel()
	if err := p.pool.QueryRow(ctx, p.sql.deadExist, p.cfg.Name, p.lease.shards, p.lease.shard).Scan(&p.deadExist); err != nil {
		return fmt.Errorf("look for dead rows: %w", silence(ctx, err))
	}
	return nil
}

func (p *publisher) retryTopics(ctx context.Context) error {
	ctx, cancel := p.patient(ctx)
	defer cancel()
	result, err := p.pool.Query(ctx, p.sql.waitingTopics, p.cfg.Name)
	if err != nil {
		return fmt.Errorf("look for dead rows: %w", err)
	}
	var missing, ready []string
	var name string
	var paused bool
	_, err = pgx.ForEachRow(result, []any{&name, &paused}, func() error {
		switch {
		case p.isPaused(name):
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
	if len(missing) > 0 {
		if err := p.learn(ctx, missing); err != nil {
			return err
		}
	}
	for _, name := range missing {
		if topic, _ := p.topics.get(name); topic.exists {
			ready = append(ready, name)
		}
	}
	if len(ready) == 0 {
		return nil
	}
	_, err = p.pool.Exec(ctx, p.sql.retryTopic, p.cfg.Name, ready)
	return err
}

const (
	reviveRowsMax = 500                    // of one round
	reviveMax     = 200 * time.Millisecond // of rounds before the outbox has its turn
)

// releasable reads a page of dead rows that can be published, as readPage does one of the outbox.
func (p *publisher) releasable(ctx context.Context) (*page, error) {
	ctx, cancel := p.patient(ctx)
	defer cancel()
	limit := min(p.reviveLimit, reviveRowsMax)
	result, err := p.pool.Query(ctx, p.sql.releasable, p.cfg.Name, limit, p.lease.shards, p.lease.shard, p.cfg.SkipDead)
	if err != nil {
		return nil, fmt.Errorf("read dead rows: %w", silence(ctx, err))
	}
	defer result.Close()
	page := &page{}
	for count := 1; result.Next(); count++ {
		page.full = count == limit
		if page.bytes > p.bytesMax/4 {
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
	p.reviveLimit = p.nextLimit(p.reviveLimit, page)
	return page, nil
}

// reviveSome publishes one page of releasable rows. Nothing else is in flight meanwhile, so the rows of
// a key cannot overtake each other.
func (p *publisher) reviveSome(ctx context.Context) (published int, more bool, err error) {
	page, err := p.releasable(ctx)
	if err != nil || len(page.rows) == 0 {
		return 0, false, err
	}
	rows := page.rows
	if err := p.learnTopics(ctx, rows); err != nil {
		return 0, false, err
	}
	maker := newRecordMaker(len(rows))
	s := &sorted{behind: map[topicKey]bool{}, skip: p.cfg.SkipDead}
	for i := range rows {
		r := &rows[i]
		if r.key != nil && s.behind[keyOf(r)] {
			continue // it stays behind
		}
		record, reason, err := p.record(maker, r)
		if err != nil {
			s.bury(r, reason, err)
			continue
		}
		s.rows, s.records = append(s.rows, r), append(s.records, record)
	}
	if err := p.settled(ctx); err != nil {
		return 0, false, err
	}
	if !p.lease.held() {
		return 0, false, errLeaseLost
	}
	switch {
	case p.exact != nil && p.anySuspect(s.rows):
		// One that is refused ends the work: what is known about others is stored first.
		if err := p.holdAgain(ctx, s.dead); err != nil {
			return 0, false, err
		}
		return len(s.rows), true, p.sendAlone(ctx, s, func(*row) cursor { return cursor{} })
	case p.cfg.Sink != nil:
		// What it took before it failed must not come again each time.
		err = errors.Join(p.feed(ctx, s, func(*row) cursor { return cursor{} }), p.forget(ctx, s))
	case p.anySuspect(s.rows):
		if err = p.sendSuspects(ctx, s); err == nil {
			err = p.forget(ctx, s)
		}
	default:
		if err = p.send(ctx, &batch{rows: s.rows, records: s.records, bytes: page.bytes}); err == nil {
			err = p.settled(ctx)
		}
		if err == nil {
			err = p.forget(ctx, s)
		}
	}
	return len(s.rows), page.full, err
}

func (p *publisher) exhume(ctx context.Context, seqs []int64) error {
	if len(seqs) == 0 {
		return nil
	}
	ctx, cancel := p.patient(ctx)
	defer cancel()
	var mine bool
	if err := p.pool.QueryRow(ctx, p.sql.exhume, p.cfg.Name, p.lease.shard, p.lease.epoch, seqs).Scan(&mine); err != nil {
		return fmt.Errorf("remove revived rows: %w", silence(ctx, err))
	}
	if !mine {
		return errLeaseLost
	}
	return nil
}

// forget removes what was published and holds again what still cannot be.
func (p *publisher) forget(ctx context.Context, s *sorted) error {
	if len(s.rows) > 0 {
		published := make([]int64, len(s.rows))
		for i, r := range s.rows {
			published[i] = r.seq
		}
		forget := func() error { return p.exhume(ctx, published) }
		if p.exact != nil {
			p.exact.revived = published
			forget = func() error { return p.commit(ctx) }
		}
		if err := forget(); err != nil {
			return err
		}
		p.cfg.Logger.InfoContext(ctx, "dead rows were published", "relay", p.cfg.Name, "rows", len(published))
	}
	return p.holdAgain(ctx, s.dead)
}

// holdAgain stores why rows that are dead already cannot be published still.
func (p *publisher) holdAgain(ctx context.Context, dead []deadRow) error {
	// A row that is only behind keeps its state; it moves when the row before it does.
	again := slices.DeleteFunc(dead, func(d deadRow) bool { return d.reason == ReasonBehind })
	if len(again) == 0 {
		return nil
	}
	ctx, cancel := p.patient(ctx)
	defer cancel()
	v := columns(again)
	var mine bool
	if err := p.pool.QueryRow(ctx, p.sql.holdAgain, p.cfg.Name, p.lease.shard, p.lease.epoch, v.seqs, v.reasons, v.errs).Scan(&mine); err != nil {
		return fmt.Errorf("hold dead rows again: %w", silence(ctx, err))
	}
	if !mine {
		return errLeaseLost
	}
	p.forgetRefusals(again)
	return nil
}
