package relay

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/crashpoint"
)

// toKafka publishes at least once: it produces records in order, and progress follows their
// acknowledgements.
type toKafka struct{ *publisher }

func (t toKafka) publish(_, ctx context.Context, a *attempt) error {
	suspect := t.anySuspect(a.rows)
	if !suspect && !a.released && len(a.dead) == 0 {
		t.send(&batch{rows: a.rows, records: a.records, bytes: a.bytes, end: a.end})
		return nil
	}
	// Progress must not pass a dead row before that row is in outbox_dead, and later rows must not
	// overtake released rows. So everything produced before is acknowledged first.
	if suspect {
		if err := t.sendEach(ctx, a); err != nil {
			return err
		}
	} else {
		t.send(&batch{rows: a.rows, records: a.records, bytes: a.bytes})
	}
	if err := t.flight.settled(ctx); err != nil {
		return err
	}
	return t.conclude(ctx, a)
}

func (t toKafka) afterPage(_, _ context.Context, _ bool) error { return nil }

func (t toKafka) store(ctx context.Context) error { return t.storeAcked(ctx) }

func (t toKafka) finish(_, ctx context.Context) error { return t.flight.settled(ctx) }

// conclude stores the outcome of an attempt whose rows are acknowledged. Targets without
// transactions use it.
func (p *publisher) conclude(ctx context.Context, a *attempt) error {
	switch {
	case a.released:
		return p.dead.published(ctx, a)
	case len(a.dead) == 0:
		p.flight.add(&batch{end: a.end})
		return nil
	}
	return p.moveToDead(ctx, a.dead, a.end)
}

// send produces records in order. It does not wait for acknowledgements.
func (p *publisher) send(b *batch) {
	b.pending = len(b.records)
	p.flight.add(b)
	promise := func(record *kgo.Record, err error) {
		if err != nil {
			if p.note(record.Topic, err, false) != "" {
				p.suspect(b.rows[slices.Index(b.records, record)].seq)
			}
			err = produceError(record.Topic, err)
		}
		p.flight.settle(b, err)
	}
	// Not cancelled with ctx: a cancelled record would leave a gap before the records after it.
	// When the relay gives up, closing the client drops what is not acknowledged. But after the first
	// failure the client would send what is handed to it under a new epoch, behind the gap.
	for _, record := range b.records {
		if p.valid.Err() != nil {
			return
		}
		p.client.Produce(p.valid, record, promise)
	}
	crashpoint.Here(crashpoint.RelayProduced)
}

// sendEach produces rows one by one and waits for each acknowledgement, to find the row that Kafka
// refuses. In an outage it concludes what precedes the first refused row. The rows that an operator
// released wait then for the next look; the others wait for the brokers.
func (p *publisher) sendEach(ctx context.Context, a *attempt) error {
	if err := p.flight.settled(ctx); err != nil {
		return err
	}
	p.alone.Store(true)
	defer p.alone.Store(false)
	tried, records := a.rows, a.records
	a.rows, a.records = a.rows[:0:0], a.records[:0:0]
	open, err := p.sendAlone(ctx, a, tried, records)
	switch {
	case open == nil && err != nil:
		return err
	case open == nil:
		p.flight.add(&batch{rows: a.rows})
		p.clearSuspects(tried)
		return nil
	case !a.released:
		if p.probe(ctx, a.end) {
			err = &refusedAlone{errTaken}
		}
		a.rows = slices.DeleteFunc(a.rows, func(r *row) bool { return r.seq > open.seq })
		a.dead = slices.DeleteFunc(a.dead, func(d deadRow) bool { return d.row.seq > open.seq })
		a.end = a.upTo(&row{seq: open.seq - 1})
	}
	p.flight.add(&batch{rows: a.rows})
	p.clearSuspects(a.rows)
	if a.released {
		p.say.warn(ctx, "the brokers refuse rows that were released; the relay retries", "relay", p.cfg.Name, "error", err)
		return nil
	}
	if len(a.rows)+len(a.dead) > 0 {
		err = errors.Join(p.conclude(ctx, a), err)
	}
	return err
}

// sendAlone produces rows one by one. A refused row is open, together with the later rows of its key,
// until the brokers take another row; then it is tried again. In an outage sendAlone returns the first
// open row and the refusal.
func (p *publisher) sendAlone(ctx context.Context, a *attempt, rows []*row, records []*kgo.Record) (open *row, err error) {
	var openRows []*row
	var openRecords []*kgo.Record
	var refusal error
	keys := map[topicKey]bool{}
	for i, r := range rows {
		if a.held(r) {
			a.give(r, ReasonBehind, errBehind)
			continue
		}
		if r.key == nil || !keys[keyOf(r)] {
			err := p.produceOne(ctx, records[i])
			reason := p.note(records[i].Topic, err, true)
			switch {
			case err == nil:
				a.rows, a.records = append(a.rows, r), append(a.records, records[i])
				p.took(r)
				if open, err := p.sendAlone(ctx, a, openRows, openRecords); err != nil {
					return open, err
				}
				openRows, openRecords = nil, nil
				clear(keys)
				continue
			case reason == "":
				return nil, produceError(records[i].Topic, err)
			case p.atFault(r, reason):
				a.give(r, reason, verdict(err))
				continue
			}
			refusal, keys[keyOf(r)] = err, true
		}
		openRows, openRecords = append(openRows, r), append(openRecords, records[i])
	}
	switch {
	case len(openRows) == 0:
		return nil, nil
	case p.outage():
		return openRows[0], outageError(openRecords[0].Topic, refusal)
	}
	p.blame(openRows)
	return p.sendAlone(ctx, a, openRows, openRecords)
}

// probe looks for a row behind a page that the brokers take, in its place in its key. It ends the streak:
// if the page's progress lies within a batch, no retry of the page reads the rows of later batches.
func (p *publisher) probe(ctx context.Context, end cursor) bool {
	page := p.reader.behind(ctx, end)
	a, err := p.try(ctx, page, cursor{}, cursor{})
	if err != nil {
		return false
	}
	for i, r := range a.rows {
		if p.inStreak(r) {
			continue
		}
		err := p.produceOne(ctx, a.records[i])
		reason := p.note(a.records[i].Topic, err, true)
		if err == nil {
			p.took()
			return true
		}
		if reason != "" {
			p.atFault(r, reason)
		}
		if reason == "" || p.cfg.ExactlyOnce { // there the transaction is void
			return false
		}
	}
	return false
}

// produceOne produces a record and waits until it is acknowledged. The client's own ProduceSync
// does not end with ctx once a broker has received the record and does not answer.
func (p *publisher) produceOne(ctx context.Context, record *kgo.Record) error {
	done := make(chan error, 1)
	p.client.Produce(ctx, record, func(_ *kgo.Record, err error) { done <- err })
	return p.answer(ctx, done)
}

// answer waits for the result that a promise of the client sends.
func (p *publisher) answer(ctx context.Context, done <-chan error) error {
	timer := time.NewTicker(signOfLifeEvery)
	defer timer.Stop()
	for {
		p.progressed()
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
		}
	}
}

// errRenewed means that the client of a shard raised its producer epoch after an error: see renewal.
var errRenewed = errors.New("the client gave up records and wants to continue behind them: the work starts over from stored progress")

// renewedMax bounds the time from a new epoch to the first failure that a promise tells.
const renewedMax = 5 * time.Second

// renewal is the log of a shard's client, in front of the caller's. When a batch has failed for good,
// franz-go fails what it has of that partition, and continues under a new epoch of its producer ID with
// what is handed over later. Those rows would be published before the failed ones, which are read again.
// The client tells the promises of the failed records too late for that: a page may be handed over in
// between. But it logs that there will be a new epoch before it uses it, and at once all records are void.
type renewal struct {
	log     kgo.Logger // nil: none
	renewed func()
}

// renewal returns what a client needs besides its options. A transaction is void after a failure.
func (p *publisher) renewal() []kgo.Opt {
	if p.cfg.ExactlyOnce {
		return nil
	}
	return []kgo.Opt{kgo.WithLogger(&renewal{p.clientLog, func() {
		if p.alone.Load() {
			return
		}
		p.flight.void(errRenewed)
		// The promises tell the cause, which may be a row that is wrong.
		time.AfterFunc(renewedMax, func() { p.flight.makeVoid(errRenewed) })
	}})}
}

func (r *renewal) Level() kgo.LogLevel {
	if r.log == nil {
		return kgo.LogLevelInfo
	}
	return max(r.log.Level(), kgo.LogLevelInfo)
}

func (r *renewal) Log(level kgo.LogLevel, msg string, keyvals ...any) {
	if strings.HasPrefix(msg, "producer ID failed") {
		r.renewed()
	}
	if r.log != nil && r.log.Level() >= level {
		r.log.Log(level, msg, keyvals...)
	}
}
