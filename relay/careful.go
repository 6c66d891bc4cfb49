package relay

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// When Kafka refuses a record for a reason that may be in it, the client fails the records behind it,
// too: most of them are not the cause. The work then starts over, and as many rows as were in flight are
// published in pages of a sixteenth of the refused one, one page at a time. If one of these is refused,
// the next are a sixteenth of that, and in the end rows are published one by one; a page that passes
// doubles the size of the next one. A row that is refused alone is dead if Kafka takes another row of the page or of
// the next one, and then refuses this one again. If it takes none, and refuses rows of several keys, it
// is an outage: the rows wait. A row that an operator retries is dead again at once.

// outageKeys is how many keys are several.
const outageKeys = 3

var errOutage = errors.New("rows of several keys were refused in a row, so they wait: correct what refuses them, or pause the topic")

// pageShare is the part of a refused page that is published at a time.
const pageShare = 16

// care is how a shard publishes after a refusal.
type care struct {
	left atomic.Int64 // rows that are still published with care; 0: none
	page atomic.Int64 // rows at a time; 1 or less: one by one

	// Used only by the worker of the shard. A number of a row may be given to another one after a
	// failover, an ID is not.
	again map[rowID]bool // refused before Kafka took another row
	ahead map[rowID]bool // published before their turn
}

// rowID names a row: several topics may have rows of one ID.
type rowID struct {
	id    uuid.UUID
	topic string
}

func idOf(r *row) rowID { return rowID{r.id, r.topic} }

// limit bounds the rows of the next page.
func (c *care) limit(rows int) int {
	if c.left.Load() == 0 {
		return rows
	}
	return min(rows, max(int(c.page.Load()), pageShare))
}

// passed notes that rows are published or dead.
func (c *care) passed(rows int) {
	c.page.Store(max(c.page.Load(), pageShare/2) * 2)
	left := max(0, c.left.Load()-int64(rows))
	if c.left.Store(left); left == 0 {
		clear(c.again)
		clear(c.ahead)
	}
}

// cares is about the rows of the outbox and about those of outbox_dead.
type cares struct{ outbox, dead care }

func (p *publisher) care(released bool) *care {
	if released {
		return &p.careful[p.lease.shard].dead
	}
	return &p.careful[p.lease.shard].outbox
}

// single publishes rows one by one, with nothing else in flight.
type single interface {
	// one produces a record and waits for the answer.
	one(ctx context.Context, record *kgo.Record) error
	// taken moves progress behind the row that was produced last.
	taken(work, ctx context.Context, a *attempt, r *row) error
	// withdraw reports whether the record that was produced last stays invisible, which makes it so.
	withdraw(ctx context.Context) (bool, error)
	// bury stores dead rows, and moves progress to end.
	bury(work, ctx context.Context, a *attempt, dead []deadRow, end cursor) error
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

// carefully is the state of publishEach.
type carefully struct {
	*publisher
	single
	*care
	a       *attempt
	rows    []*row
	records []*kgo.Record
}

// publishEach publishes the rows of an attempt one by one.
func (p *publisher) publishEach(work, ctx context.Context, a *attempt, by single) error {
	if err := p.target.finish(work, ctx); err != nil {
		return err
	}
	p.alone.Store(true)
	defer p.alone.Store(false)
	c := &carefully{publisher: p, single: by, care: p.care(a.released), a: a, rows: a.rows, records: a.records}
	if c.again == nil {
		c.again, c.ahead = map[rowID]bool{}, map[rowID]bool{}
	}
	all := len(a.rows) + len(a.dead)
	a.rows = nil
	for i, r := range c.rows {
		err := c.decide(work, ctx, i, r)
		if a.released && errors.Is(err, errOutage) { // other rows do not wait for these
			p.say.warn(ctx, "the brokers refuse rows that were released; the relay retries", "relay", p.cfg.Name, "error", err)
			return nil
		}
		if err != nil {
			return err
		}
	}
	if err := c.buryBefore(work, ctx, math.MaxInt64, a.end); err != nil {
		return err
	}
	c.passed(all)
	return nil
}

// decide publishes a row, or finds that it is dead.
func (c *carefully) decide(work, ctx context.Context, i int, r *row) error {
	if c.a.held(r) {
		c.a.give(r, ReasonBehind, errBehind)
		return nil
	}
	if err := c.buryBefore(work, ctx, r.seq, c.a.upTo(&row{seq: r.seq - 1})); err != nil {
		return err
	}
	var reason Reason
	var refusal error
	if !c.ahead[idOf(r)] {
		var err error
		if reason, refusal, err = c.try(ctx, c.records[i]); err != nil {
			return err
		}
	}
	if refusal != nil && reason != ReasonTooLarge && !c.again[idOf(r)] && !r.was.ofRow() {
		if err := c.seek(ctx, i, refusal); err != nil {
			return err
		}
		var err error
		if reason, refusal, err = c.try(ctx, c.records[i]); err != nil {
			return err
		}
	}
	if refusal != nil {
		remedy := "fix the cause"
		if reason == ReasonTooLarge {
			remedy = "raise max.message.bytes of the topic"
		}
		c.a.give(r, reason, fmt.Errorf("%w: %s and retry the row, or discard it", refusal, remedy))
		return nil
	}
	c.a.rows = append(c.a.rows, r)
	return c.taken(work, ctx, c.a, r)
}

// try produces a record alone. It returns why Kafka refuses it, or an error that is not about the record.
func (c *carefully) try(ctx context.Context, record *kgo.Record) (reason Reason, refusal, err error) {
	if refusal = c.single.one(ctx, record); refusal == nil {
		return "", nil, nil
	}
	if reason = c.note(record.Topic, refusal); reason == "" {
		return "", nil, produceError(record.Topic, refusal)
	}
	return reason, refusal, nil
}

// seek looks for a row behind a refused one that Kafka takes, on the page and on the next one. Those that
// it refuses meanwhile are dead if it refuses them again. It returns an error in an outage.
func (c *carefully) seek(ctx context.Context, i int, refusal error) error {
	rows, records := c.rows[i:], c.records[i:]
	keys := map[topicKey]bool{}
	seen := 0
	for more := true; ; more = false {
		for j, r := range rows {
			if r.key != nil && keys[keyOf(r)] || c.a.held(r) || c.ahead[idOf(r)] {
				continue
			}
			if j > 0 || !more {
				_, why, err := c.try(ctx, records[j])
				if err != nil {
					return err
				}
				if why == nil {
					return c.found(ctx, r)
				}
				refusal = why
			}
			seen++
			c.again[idOf(r)] = true
			if r.key != nil {
				keys[keyOf(r)] = true
			}
		}
		if !more {
			break
		}
		end := c.a.end
		if c.a.released {
			end = c.reader.at
		}
		page, err := c.reader.behind(ctx, end)
		if err != nil {
			return err
		}
		next, err := c.publisher.try(ctx, page, cursor{}, cursor{})
		if err != nil {
			return err
		}
		rows, records = next.rows, next.records
	}
	if seen < outageKeys {
		return nil
	}
	clear(c.again)
	return fmt.Errorf("%w; %w", produceError(c.records[i].Topic, refusal), errOutage)
}

// found is called for the row that Kafka took. It is not published again, if it was published.
func (c *carefully) found(ctx context.Context, r *row) error {
	invisible, err := c.withdraw(ctx)
	if err == nil && !invisible {
		c.ahead[idOf(r)] = true
	}
	return err
}

// buryBefore stores the dead rows before seq, and moves progress to end.
func (c *carefully) buryBefore(work, ctx context.Context, seq int64, end cursor) error {
	at := func(d deadRow) bool { return d.row.seq >= seq }
	before := slices.DeleteFunc(slices.Clone(c.a.dead), at)
	if len(before) == 0 && seq < math.MaxInt64 {
		return nil
	}
	slices.SortFunc(before, func(x, y deadRow) int { return int(x.row.seq - y.row.seq) })
	c.a.dead = slices.DeleteFunc(c.a.dead, func(d deadRow) bool { return !at(d) })
	return c.bury(work, ctx, c.a, before, end)
}

// produceError is why the brokers did not take records, with the remedy if the cause is not in them.
func produceError(topic string, err error) error {
	remedy := ""
	if errors.Is(err, kerr.InvalidTimestamp) {
		remedy = "; it is the time of publishing: compare the clocks of relay and brokers, and see message.timestamp.* of the topic"
	}
	return fmt.Errorf("produce to topic %q: %w%s", topic, fromOutlet(err), remedy)
}
