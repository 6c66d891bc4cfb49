package relay

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/crashpoint"
)

// toKafka publishes at least once: it produces records in order, and progress follows their
// acknowledgements.
type toKafka struct{ *publisher }

func (t toKafka) publish(work, ctx context.Context, a *attempt) error {
	care := t.care(a.released)
	switch {
	case care.alone():
		if err := t.tryEach(work, ctx, a, t.one); err != nil {
			return err
		}
		a.records = nil // they are acknowledged
	case !a.released && len(a.dead) == 0 && care.left.Load() == 0:
		t.send(&batch{rows: a.rows, records: a.records, bytes: a.bytes, end: a.end})
		return nil
	}
	// Progress must not pass a dead row before that row is in outbox_dead, and later rows must not
	// overtake released rows. So everything produced before is acknowledged first.
	t.send(&batch{rows: a.rows, records: a.records, bytes: a.bytes, released: a.released})
	if err := t.flight.settled(ctx); err != nil {
		return err
	}
	care.passed(len(a.rows) + len(a.dead))
	return t.conclude(ctx, a)
}

func (t toKafka) afterPage(_, _ context.Context, _ bool) (time.Duration, error) {
	return t.cfg.PollMax, nil
}

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
			reason := p.note(record.Topic, err)
			if err = produceError(record.Topic, err); reason != "" {
				err = &refused{err}
				p.refusing.Do(func() { p.takeCare(b, record.Topic, reason) })
			}
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

// one produces a record and waits until it is acknowledged. The client's own ProduceSync
// does not end with ctx once a broker has received the record and does not answer.
func (p *publisher) one(ctx context.Context, record *kgo.Record) error {
	done := make(chan error, 1)
	p.client.Produce(ctx, record, func(_ *kgo.Record, err error) { done <- err })
	return p.answer(ctx, done)
}

// answer waits for the result that a promise of the client sends.
func (p *publisher) answer(ctx context.Context, done <-chan error) error {
	defer p.flight.awaits()()
	for {
		p.progressed()
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(signOfLifeEvery):
		}
	}
}

// errRenewed means that the client of a shard raised its producer epoch after an error: see renewal.
var errRenewed error = &refused{errors.New("the client gave up records and wants to continue behind them: the work starts over from stored progress")}

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

// producing returns what a client needs besides its options. A transaction is void after a failure.
func (p *publisher) producing() []kgo.Opt {
	sizes := kgo.ProducerBatchMaxBytesFn(p.topics.batchBytes)
	if p.cfg.ExactlyOnce {
		return []kgo.Opt{sizes}
	}
	return []kgo.Opt{sizes, kgo.WithLogger(&renewal{p.clientLog, func() {
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
