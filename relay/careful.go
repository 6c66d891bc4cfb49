package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// When Kafka refuses a record for a reason that may be in it, the client fails the records behind it,
// too: most of them are not the cause. The work then starts over, and as many rows as were in flight are
// published in pages of a sixteenth of the refused one, one page at a time. If one of these is refused,
// the next are a sixteenth of that; a page that passes doubles the size of the next one. In the end the rows
// of a page are tried one by one: see tryEach.

// outageKeys is how many keys are several.
const outageKeys = 3

var errOutage = errors.New("rows of several keys were refused in a row, so they wait: correct what refuses them, or pause the topic")

// pageShare is the part of a refused page that is published at a time.
const pageShare = 16

// care is how a shard publishes after a refusal.
type care struct {
	left atomic.Int64 // rows that are still published with care; 0: none
	page atomic.Int64 // rows at a time; 1 or less: they are tried one by one
}

func (c *care) alone() bool { return c.left.Load() > 0 && c.page.Load() <= 1 }

// limit bounds the rows of the next page.
func (c *care) limit(rows int) int {
	if c.left.Load() == 0 {
		return rows
	}
	return min(rows, max(int(c.page.Load()), pageShare))
}

// passed notes that rows are published or dead.
func (c *care) passed(rows int) {
	if rows == 0 {
		return
	}
	c.page.Store(max(c.page.Load(), pageShare/2) * 2)
	c.left.Store(max(0, c.left.Load()-int64(rows)))
}

// cares is about the rows of the outbox and about those of outbox_dead.
type cares struct{ outbox, dead care }

func (p *publisher) care(released bool) *care {
	if released {
		return &p.careful[p.lease.shard].dead
	}
	return &p.careful[p.lease.shard].outbox
}

// refused ends the work because Kafka refused a batch. It begins again with care.
type refused struct{ cause error }

func (r *refused) Error() string { return r.cause.Error() }
func (r *refused) Unwrap() error { return r.cause }

// takeCare notes that Kafka refused a batch. If smaller batches may help, they are tried first.
func (p *publisher) takeCare(b *batch, topic string, reason Reason) {
	if reason == ReasonTooLarge {
		largest := 0
		for _, r := range b.rows {
			largest = max(largest, r.bytes())
		}
		now := int(p.topics.batchBytes(topic))
		half := max(min(now, b.bytes)/2, 1024)
		p.batches.Store(topic, int32(half))
		if half > largest && half < now {
			return
		}
	}
	c := p.care(b.released)
	c.page.Store(int64(len(b.rows) / pageShare))
	c.left.Store(max(c.left.Load(), p.flight.unstored()))
}

// trial hands rows to Kafka one by one, with nothing else in flight.
type trial struct {
	*publisher
	a      *attempt
	one    func(context.Context, *kgo.Record) error
	doubts []doubt           // rows that are dead if they are refused again
	keys   map[topicKey]bool // theirs
	streak int               // how many of the last doubts there are since Kafka took a row
	outage bool              // these are no fault of the rows
	last   error             // why it refused the last one
	end    int64             // rows from this seq on are left out of the attempt
}

type doubt struct {
	seq    int64
	record *kgo.Record
}

// tryEach hands over the rows of an attempt and moves those that are wrong to dead: those that Kafka refuses
// before it takes another row, and then refuses again. Rows of several keys that it refuses behind the last
// one that it takes, also on the next page, are an outage: they are left out of the attempt, and wait if
// nothing else is in it. A row, or a few, that it refuses twice are dead, and so is a row at once that an
// operator has retried.
func (p *publisher) tryEach(work, ctx context.Context, a *attempt, one func(context.Context, *kgo.Record) error) error {
	if err := p.target.finish(work, ctx); err != nil {
		return err
	}
	p.alone.Store(true)
	defer p.alone.Store(false)
	t := &trial{publisher: p, a: a, one: one, keys: map[topicKey]bool{}, end: math.MaxInt64}
	rows, records := a.rows, a.records
	a.rows, a.records = nil, nil
	for i, r := range rows {
		if err := t.try(ctx, r, records[i]); err != nil {
			return err
		}
	}
	if err := t.judge(ctx); err != nil {
		return err
	}
	a.endBefore(t.end)
	switch {
	case !t.outage || len(a.rows)+len(a.dead) > 0:
		return nil
	case a.released: // other rows do not wait for these
		p.say.warn(ctx, "the brokers refuse rows that were released; the relay retries", "relay", p.cfg.Name, "error", t.last)
		return nil
	}
	return fmt.Errorf("%w; %w", t.last, errOutage)
}

func (t *trial) try(ctx context.Context, r *row, record *kgo.Record) error {
	if t.a.held(r) {
		t.a.give(r, ReasonBehind, errBehind)
		return nil
	}
	if r.key != nil && t.keys[keyOf(r)] { // with SkipDead
		t.end = min(t.end, r.seq)
		return nil
	}
	reason, why, err := t.refusal(ctx, record)
	switch {
	case err != nil:
		return err
	case why != nil:
		t.refused(r, record, reason, why)
	default:
		t.a.rows, t.a.records, t.streak = append(t.a.rows, r), append(t.a.records, record), 0
	}
	return nil
}

func (t *trial) refused(r *row, record *kgo.Record, reason Reason, why error) {
	remedy := "fix the cause"
	if reason == ReasonTooLarge {
		remedy = "raise max.message.bytes of the topic"
	}
	t.a.give(r, reason, fmt.Errorf("%w: %s and retry the row, or discard it", why, remedy))
	if reason == ReasonTooLarge || r.was.ofRow() {
		return
	}
	if r.key != nil {
		t.keys[keyOf(r)] = true
	}
	t.doubts = append(t.doubts, doubt{r.seq, record})
	t.streak++
	t.last = produceError(record.Topic, why)
}

// judge decides what the doubts are.
func (t *trial) judge(ctx context.Context) error {
	if t.streak > 0 {
		taken, refused, err := t.seek(ctx)
		if err != nil {
			return err
		}
		if t.outage = !taken && t.streak+refused >= outageKeys; t.outage {
			t.end = min(t.end, t.doubts[len(t.doubts)-t.streak].seq)
		}
	}
	for _, d := range t.doubts {
		if d.seq >= t.end {
			return nil
		}
		if _, why, err := t.refusal(ctx, d.record); err != nil || why == nil {
			return cmp.Or(err, error(&refused{errTaken}))
		}
	}
	return nil
}

// errTaken begins the work anew: rows of the key may have been left out meanwhile.
var errTaken = errors.New("the brokers take a row that they refused before")

// seek reports whether Kafka takes a row behind the attempt, of another key, and how many it refuses before.
// At least once, the row that it takes is published again in its turn.
func (t *trial) seek(ctx context.Context) (taken bool, refused int, err error) {
	end := t.a.end
	if t.a.released {
		end = t.reader.at
	}
	page, err := t.reader.behind(ctx, end)
	if err != nil {
		return false, 0, err
	}
	next, err := t.publisher.try(ctx, page, cursor{}, cursor{})
	if err != nil {
		return false, 0, err
	}
	for i, r := range next.rows {
		if r.key != nil && (t.a.held(r) || t.keys[keyOf(r)]) {
			continue
		}
		_, why, err := t.refusal(ctx, next.records[i])
		if err != nil || why == nil {
			return err == nil, refused, err
		}
		t.keys[keyOf(r)] = true
		refused++
	}
	return false, refused, nil
}

// refusal produces a record alone. It returns why Kafka refuses it, or an error that is not about the record.
func (t *trial) refusal(ctx context.Context, record *kgo.Record) (reason Reason, why, err error) {
	if why = t.one(ctx, record); why != nil {
		reason = t.note(record.Topic, why)
	}
	if why != nil && reason == "" {
		return "", nil, produceError(record.Topic, why)
	}
	return reason, why, nil
}

// endBefore leaves the rows from a seq on out of the attempt.
func (a *attempt) endBefore(seq int64) {
	n, _ := slices.BinarySearchFunc(a.rows, seq, func(r *row, seq int64) int { return cmp.Compare(r.seq, seq) })
	a.rows, a.records = a.rows[:n], a.records[:n]
	a.dead = slices.DeleteFunc(a.dead, func(d deadRow) bool { return d.row.seq >= seq })
	slices.SortFunc(a.dead, func(x, y deadRow) int { return cmp.Compare(x.row.seq, y.row.seq) })
	if seq < math.MaxInt64 {
		a.end = a.upTo(&row{seq: seq - 1})
	}
}

// produceError is why the brokers did not take records, with the remedy if the cause is not in them.
func produceError(topic string, err error) error {
	remedy := ""
	if errors.Is(err, kerr.InvalidTimestamp) {
		remedy = "; it is the time of publishing: compare the clocks of relay and brokers, and see message.timestamp.* of the topic"
	}
	return fmt.Errorf("produce to topic %q: %w%s", topic, fromOutlet(err), remedy)
}
