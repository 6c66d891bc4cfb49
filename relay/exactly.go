package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/crashpoint"
)

// transaction is what a publisher needs to write records and progress in one Kafka transaction. Progress is a
// record of the journal; the row in outbox_progress follows it, for retention and for people.
type transaction struct {
	journal *journal
	max     time.Duration
	begun   time.Time // of the transaction under way; zero: there is none
	at      cursor    // the last one that was committed
	rows    int64     // all that were ever committed
	revived []int64   // dead rows that the transaction publishes
	dead    []deadRow // what it steps over
	void    error     // why nothing can be committed any more: the work starts over
}

func (t *transaction) due(pageFull bool) bool { return !pageFull || time.Since(t.begun) >= t.max }

// beginExactlyOnce fences whoever published this shard before, aborts what that one had under way, and goes on
// from what was committed last.
func (p *publisher) beginExactlyOnce(ctx context.Context) error {
	p.exact = &transaction{journal: p.newJournal(), max: p.cfg.TransactionMax, rows: p.lease.stored.published}
	if err := p.exact.journal.prepare(ctx, p.client); err != nil {
		return err
	}
	if _, _, err := p.client.ProducerID(ctx); err != nil {
		return fmt.Errorf("begin transactions as %q: %w", p.exact.journal.id, err)
	}
	found, err := p.exact.journal.read(ctx, p.client)
	if err != nil {
		return fmt.Errorf("read progress topic %q: %w", p.cfg.ProgressTopic, err)
	}
	p.exact.at = p.lease.cursor
	if found == nil {
		return nil
	}
	if _, err := p.lease.cluster.movedFrom(cluster{system: found.System, timeline: found.Timeline}); err != nil {
		return fmt.Errorf("progress topic %q: %w; or, where an older state of it was put back on purpose, give the relay another progress topic", p.cfg.ProgressTopic, err)
	}
	if !found.after(p.lease) {
		return nil
	}
	at, err := found.cursor()
	if err != nil {
		return fmt.Errorf("progress topic %q, offset %d: %w", p.cfg.ProgressTopic, found.offset, err)
	}
	remembered, err := p.exact.journal.remembered(ctx, at)
	if err != nil {
		return fmt.Errorf("look for the ticks of progress topic %q: %w", p.cfg.ProgressTopic, err)
	}
	if !remembered {
		p.cfg.Logger.ErrorContext(ctx, "the database went back behind what was published, to a backup or a dump: the relay goes on from the database's progress, so consumers will see duplicates",
			"relay", p.cfg.Name, "shard", p.lease.shard)
		return nil
	}
	p.exact.at = at
	p.cfg.Logger.InfoContext(ctx, "progress is taken from Kafka, which is ahead of the database's copy", "relay", p.cfg.Name, "shard", p.lease.shard,
		"rows", found.Published-p.lease.stored.published)
	p.exact.rows = found.Published
	p.read = p.exact.at
	p.mark = floorMark{xmax: p.read.from.xmax, seqLast: p.read.from.seqLast}
	if err := p.exhume(ctx, found.Revived); err != nil {
		return err
	}
	rows := found.Published - p.lease.stored.published
	if dead := found.verdicts(); len(dead.seqs) > 0 {
		return p.storeBuried(ctx, dead, p.exact.at, rows)
	}
	return p.storeCursor(ctx, p.pool, p.exact.at, rows)
}

// produceBesideDead produces a page that has dead rows, and commits at once: they move to outbox_dead behind the
// commit, together with the copy of progress, and the next page has to find them there. Before the commit they must
// not: whoever goes on from the progress before it would publish them from there and from the outbox, and an operator
// could discard what is read again.
func (p *publisher) produceBesideDead(ctx context.Context, s *sorted, bytes int, end cursor) error {
	if len(s.records) == 0 {
		p.enqueue(&batch{end: end})
	} else if err := p.send(ctx, &batch{rows: s.rows, records: s.records, bytes: bytes, end: end}); err != nil {
		return err
	}
	p.exact.dead = s.dead
	return p.commit(ctx)
}

// produceAlone is produce with each row in a transaction of its own, which steps over the dead rows before it: see
// sendAlone.
func (p *publisher) produceAlone(ctx context.Context, s *sorted, end cursor) error {
	inside, dead := p.inside(end), s.dead
	err := p.sendAlone(ctx, s, func(r *row) cursor {
		n := 0
		for n < len(dead) && dead[n].row.seq < r.seq {
			n++
		}
		p.exact.dead, dead = dead[:n], dead[n:]
		return inside(r)
	})
	if err != nil {
		return err
	}
	p.enqueue(&batch{end: end})
	p.exact.dead = dead
	return p.commit(ctx)
}

// open begins a transaction unless one is under way.
func (p *publisher) open() error {
	if p.exact == nil || !p.exact.begun.IsZero() {
		return nil
	}
	if err := p.client.BeginTransaction(); err != nil {
		return fmt.Errorf("begin a transaction: %w", err)
	}
	p.exact.begun = time.Now()
	return nil
}

// commit ends the transaction under way, with what is acknowledged as progress, and stores the copy. Everything
// in flight is waited for first. Once that is done it does not end with ctx, only with the work and in time: a
// transaction that was cut off is void, unless the journal says that it was committed.
func (p *publisher) commit(ctx context.Context) error {
	if err := p.settled(ctx); err != nil {
		return err
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(transactionTimeout)
	}
	ctx, cancel := context.WithDeadline(p.life, deadline)
	defer cancel()
	p.storing.Lock()
	defer p.storing.Unlock()
	if p.exact.void == nil {
		p.exact.void = p.commitAcked(ctx) //nolint:contextcheck // the work's own
	}
	return p.exact.void
}

// void lets nothing be committed any more.
func (p *publisher) void(why error) error {
	p.storing.Lock()
	defer p.storing.Unlock()
	if p.exact.void == nil {
		p.exact.void = why
	}
	return why
}

func (p *publisher) commitAcked(ctx context.Context) error {
	t := p.exact
	end, rows := p.takeAcked()
	if end == nil {
		end = &t.at
	}
	if t.begun.IsZero() && *end == t.at && len(t.dead) == 0 {
		return nil
	}
	// The ticks are stored, and with them every commit that they saw is durable, before Kafka knows of it: a
	// server that crashes and loses commits must not give their transaction ids out again behind a tick.
	if err := errors.Join(p.store(ctx, p.pool, end.from), p.store(ctx, p.pool, end.to)); err != nil {
		return err
	}
	if !t.begun.IsZero() {
		if err := p.endTransaction(ctx, *end, rows); err != nil {
			return err
		}
	}
	t.at = *end
	if err := p.exhume(ctx, t.revived); err != nil {
		return err
	}
	t.revived = nil
	if len(t.dead) == 0 {
		err := p.storeCursor(ctx, p.pool, *end, rows)
		if err != nil {
			return err
		}
	} else {
		if err := p.storeBuried(ctx, columns(t.dead), *end, rows); err != nil {
			return err
		}
		p.buried(ctx, t.dead)
		t.dead = nil
	}
	crashpoint.Here(crashpoint.RelayProgressed)
	p.count(rows)
	return nil
}

func (p *publisher) endTransaction(ctx context.Context, end cursor, rows int64) error {
	t := p.exact
	record, err := t.journal.record(p.lease, end, t.rows+rows, t)
	if err != nil {
		return err
	}
	if !p.lease.held() {
		return errLeaseLost
	}
	if err := p.produceOne(ctx, record); err != nil {
		return fmt.Errorf("write progress to topic %q: %w", p.cfg.ProgressTopic, err)
	}
	crashpoint.Here(crashpoint.RelayAcknowledged)
	if err := p.client.EndTransaction(ctx, kgo.TryCommit); err != nil {
		return fmt.Errorf("commit a transaction: %w", err)
	}
	crashpoint.Here(crashpoint.RelayCommitted)
	t.begun, t.rows = time.Time{}, t.rows+rows
	return nil
}

// abort ends what was not committed, so that readers need not wait until it times out.
func (p *publisher) abort(ctx context.Context) {
	if p.exact.begun.IsZero() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortMax)
	defer cancel()
	err := p.client.AbortBufferedRecords(ctx)
	if err == nil {
		err = p.client.EndTransaction(ctx, kgo.TryAbort)
	}
	if err != nil {
		p.cfg.Logger.WarnContext(ctx, "a transaction was left open; whoever publishes the shard next aborts it", "relay", p.cfg.Name, "shard", p.lease.shard, "error", err)
	}
}

const abortMax = 2 * time.Second
