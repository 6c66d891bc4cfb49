package relay

import (
	"context"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/crashpoint"
)

// toTransactions publishes exactly once: records and progress are in one Kafka transaction. Progress is a
// record of the journal; the chain in the database follows it, for retention and for people, every ProgressEvery.
type toTransactions struct {
	*publisher
	journal *journal

	begun    time.Time // of the transaction under way; zero: there is none
	end      cursor    // behind what was handed over last
	handed   int64     // rows of the transaction
	released []int64   // dead rows that it publishes
	dead     []deadRow // what it steps over

	at   cursor // the last one that was committed
	rows int64  // all that were ever committed
	void error  // why nothing can be committed any more: the work starts over
	// Committed and not copied to the database. Under progress.storing, like void.
	uncopied int64
}

// begin fences whoever published this shard before, aborts what that one had under way, and goes on
// from what was committed last.
func (t *toTransactions) begin(ctx context.Context) error {
	t.journal, t.rows, t.at = t.newJournal(), t.lease.stored.published, t.lease.cursor
	if err := t.beginTransactions(ctx); err != nil {
		return err
	}
	ended := t.expect(t.cfg.patience()) // beside the pauses in which it gives signs of life
	found, err := t.journal.read(ctx, t.client, t.lease.journal)
	ended()
	if err != nil {
		return fmt.Errorf("read progress topic %q: %w", t.cfg.ProgressTopic, fromOutlet(err))
	}
	if found == nil {
		return nil
	}
	if _, err := t.lease.cluster.movedFrom(cluster{system: found.System, timeline: found.Timeline}); err != nil {
		return fmt.Errorf("progress topic %q: %w; or, where an older state of it was put back on purpose, give the relay another progress topic", t.cfg.ProgressTopic, err)
	}
	if !found.after(t.lease) {
		return nil
	}
	return t.adopt(ctx, found)
}

func (t *toTransactions) beginTransactions(ctx context.Context) error {
	ctx, cancel := t.asking(ctx)
	defer cancel()
	if err := t.journal.prepare(ctx, t.client); err != nil {
		return fromOutlet(err)
	}
	if _, _, err := t.client.ProducerID(ctx); err != nil {
		return fmt.Errorf("begin transactions as %q: %w", t.journal.id, fromOutlet(err))
	}
	return nil
}

// adopt goes on from progress in Kafka that is ahead of the database's copy.
func (t *toTransactions) adopt(ctx context.Context, found *entry) error {
	at, err := found.cursor()
	if err != nil {
		return fmt.Errorf("progress topic %q, offset %d: %w", t.cfg.ProgressTopic, found.offset, err)
	}
	remembered, err := t.journal.remembered(ctx, at)
	if err != nil {
		return fmt.Errorf("look for the ticks of progress topic %q: %w", t.cfg.ProgressTopic, err)
	}
	if !remembered {
		t.cfg.Logger.ErrorContext(ctx, "the database went back behind what was published, to a backup or a dump: the relay goes on from the database's progress, so consumers will see duplicates",
			"relay", t.cfg.Name, "shard", t.lease.shard)
		return nil
	}
	rows := found.Published - t.lease.stored.published
	t.cfg.Logger.InfoContext(ctx, "progress is taken from Kafka, which is ahead of the database's copy", "relay", t.cfg.Name, "shard", t.lease.shard, "rows", rows)
	t.at, t.rows = at, found.Published
	t.reader.from(at)
	if err := t.publisher.dead.remove(ctx, found.Revived); err != nil {
		return err
	}
	if err := t.storeAdopted(ctx, found, rows); err != nil {
		return err
	}
	// The look before the lease did not know the numbers that Kafka knows.
	repaired, err := t.checkSequences(ctx, t.lease.cluster.run)
	if err == nil && repaired {
		err = errLeaseLost
	}
	return err
}

func (t *toTransactions) storeAdopted(ctx context.Context, found *entry, rows int64) error {
	t.progress.storing.Lock()
	defer t.progress.storing.Unlock()
	t.lease.journal = t.journal.last
	if dead := found.verdicts(); len(dead.seqs) > 0 {
		return t.storeDead(ctx, dead, t.at, rows, t.journal.last)
	}
	return t.progress.store(ctx, t.at, rows, t.journal.last)
}

// publish adds the rows to the transaction. One with dead rows, or released ones, is committed at once: dead rows move to
// outbox_dead behind the commit, together with the copy of progress, and the next page has to find them there. Before the
// commit they must not: the next holder, which goes on from the progress before it, would publish them from there
// and from the outbox, and an operator could discard what is read again.
func (t *toTransactions) publish(work, ctx context.Context, a *attempt) error {
	if t.anySuspect(a.rows) {
		return t.publishEach(work, ctx, a)
	}
	if err := t.hand(ctx, &batch{rows: a.rows, records: a.records, bytes: a.bytes, end: a.end}); err != nil {
		return err
	}
	if a.released {
		t.released = seqs(a.rows)
		if err := t.commit(work, ctx); err != nil {
			return err
		}
		if len(a.rows) > 0 {
			t.cfg.Logger.InfoContext(ctx, "dead rows were published", "relay", t.cfg.Name, "rows", len(a.rows))
		}
		return t.publisher.dead.holdAgain(ctx, a.dead)
	}
	if len(a.dead) == 0 {
		return nil
	}
	t.dead = a.dead
	return t.commit(work, ctx)
}

// hand adds a batch to the transaction, which begins with the first record.
func (t *toTransactions) hand(ctx context.Context, b *batch) error {
	if len(b.records) > 0 {
		if err := t.open(); err != nil {
			return err
		}
	}
	if b.end.from != nil {
		t.end = b.end
	}
	if len(b.records) == 0 {
		t.flight.add(b)
		return nil
	}
	t.handed += int64(len(b.rows))
	t.send(ctx, b)
	return nil
}

// publishEach produces each row in a transaction of its own, which steps over the dead rows before it. A refusal makes the
// transaction void: the work starts over, and it is known then which row it is.
func (t *toTransactions) publishEach(work, ctx context.Context, a *attempt) error {
	dead := a.dead
	if a.released { // a refusal ends the work: what is known about others is stored first
		if err := t.publisher.dead.holdAgain(ctx, dead); err != nil {
			return err
		}
		dead = nil
	}
	for i, r := range a.rows {
		if err := t.commit(work, ctx); err != nil {
			return err
		}
		if err := t.open(); err != nil {
			return err
		}
		if err := t.produceOne(ctx, a.records[i]); err != nil {
			// It may be in the transaction, and is in no progress: a stop must not commit it.
			cause := t.makeVoid(fmt.Errorf("produce to topic %q: %w", a.records[i].Topic, fromOutlet(err)))
			if t.topics.note(a.records[i].Topic, err, true) == "" {
				return cause
			}
			t.refuse(r.seq, fmt.Errorf("%w: mend the cause and retry the row, or discard it", err))
			return &refusedAlone{cause}
		}
		if a.released {
			t.released = []int64{r.seq}
		}
		n := 0
		for n < len(dead) && dead[n].row.seq < r.seq {
			n++
		}
		t.dead, dead = dead[:n], dead[n:]
		if end := a.upTo(r); end.from != nil {
			t.end = end
		}
		t.handed++
		t.flight.add(&batch{rows: a.rows[i : i+1], end: a.upTo(r)})
		t.acquit(a.rows[i : i+1])
	}
	if err := t.commit(work, ctx); err != nil || a.released {
		return err
	}
	if err := t.hand(ctx, &batch{end: a.end}); err != nil {
		return err
	}
	t.dead = dead
	return t.commit(work, ctx)
}

// paged ends the transaction, unless there is more to put into it and time left.
func (t *toTransactions) paged(work, ctx context.Context, full bool) error {
	if full && time.Since(t.begun) < t.cfg.TransactionMax {
		return nil
	}
	if t.begun.IsZero() && t.journal.far(ctx, t.client) {
		if err := t.open(); err != nil {
			return err
		}
	}
	return t.commit(work, ctx)
}

func (t *toTransactions) finish(work, ctx context.Context) error {
	if err := t.commit(work, ctx); err != nil {
		return err
	}
	t.progress.storing.Lock()
	defer t.progress.storing.Unlock()
	ctx, cancel := t.storing(ctx) // a write that is cut off would stand in the way of the next
	defer cancel()
	return t.copy(ctx)
}

// open begins a transaction unless one is under way.
func (t *toTransactions) open() error {
	if !t.begun.IsZero() {
		return nil
	}
	if err := t.client.BeginTransaction(); err != nil {
		return fmt.Errorf("begin a transaction: %w", fromOutlet(err))
	}
	t.begun = time.Now()
	return nil
}

// commit ends the transaction under way, with progress behind all that is in it. Everything in flight is waited for first.
// Once that is done it does not end with ctx, only with the work and in time: a transaction that was cut off is void,
// unless the journal says that it was committed.
func (t *toTransactions) commit(work, ctx context.Context) error {
	t.progress.storing.Lock()
	defer t.progress.storing.Unlock()
	if t.void != nil {
		return t.void
	}
	if t.end.from == nil { // nothing moves progress: released rows
		t.end = t.at
	}
	if t.begun.IsZero() && t.end == t.at && len(t.dead) == 0 {
		return t.flight.settled(ctx)
	}
	if err := t.prepare(ctx); err != nil {
		return err
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(transactionTimeout)
	}
	work, cancel := context.WithDeadline(work, deadline)
	defer cancel()
	t.void = t.commitPrepared(work)
	return t.void
}

// makeVoid lets nothing be committed any more.
func (t *toTransactions) makeVoid(why error) error {
	t.progress.storing.Lock()
	defer t.progress.storing.Unlock()
	if t.void == nil {
		t.void = why
	}
	return why
}

// prepare makes everything durable that a commit needs. The ticks are stored, and with them every commit that they saw,
// before Kafka knows of them: a server that crashes and loses commits must not give their transaction ids out again
// behind a tick. Meanwhile the brokers store the rows, and then the progress record with them. If prepare is
// interrupted it can be called again: of several progress records in one transaction the last one counts.
func (t *toTransactions) prepare(ctx context.Context) error {
	if err := t.progress.ticks(ctx, t.end); err != nil {
		return err
	}
	if t.begun.IsZero() {
		return t.flight.settled(ctx)
	}
	record, err := t.journal.record(t.lease, t.end, t.rows+t.handed, t)
	if err != nil {
		return err
	}
	if !t.lease.held() {
		return errLeaseLost
	}
	wrote := make(chan error, 1)
	t.client.Produce(context.WithoutCancel(ctx), record, func(r *kgo.Record, err error) {
		t.journal.wrote = r.Offset
		wrote <- err
	})
	if err := t.flight.settled(ctx); err != nil {
		return err
	}
	if err = t.answer(ctx, wrote); err != nil && ctx.Err() == nil {
		return fmt.Errorf("write progress to topic %q: %w", t.cfg.ProgressTopic, fromOutlet(err))
	}
	if err != nil {
		return err
	}
	return nil
}

func (t *toTransactions) commitPrepared(ctx context.Context) error {
	t.flight.take()
	if !t.begun.IsZero() {
		if !t.lease.held() {
			return errLeaseLost
		}
		crashpoint.Here(crashpoint.RelayAcknowledged)
		ended := t.expect(transactionTimeout)
		// Nothing is buffered. The call waits for the client's look at a topic that is new to it, which may still be about to make the topic's
		// partitions known (under unknownTopicsMu, which the call takes): the end of the transaction would not reset their sequence numbers, and
		// the next one would end with OUT_OF_ORDER_SEQUENCE_NUMBER (franz-go 1.22.2).
		err := t.client.AbortBufferedRecords(ctx)
		if err == nil {
			err = t.client.EndTransaction(ctx, kgo.TryCommit)
		}
		ended()
		if err != nil {
			return fmt.Errorf("commit a transaction: %w", fromOutlet(err))
		}
		crashpoint.Here(crashpoint.RelayCommitted)
		t.begun = time.Time{}
		t.journal.committed()
	}
	t.at, t.rows, t.uncopied, t.handed = t.end, t.rows+t.handed, t.uncopied+t.handed, 0
	if err := t.publisher.dead.remove(ctx, t.released); err != nil {
		return err
	}
	t.released = nil
	if len(t.dead) == 0 {
		return nil // copied in a while: see store
	}
	if err := t.storeDead(ctx, columns(t.dead), t.at, t.uncopied, t.journal.last); err != nil {
		return err
	}
	t.copied()
	t.publisher.dead.moved(ctx, t.dead)
	t.dead = nil
	return nil
}

// store copies what was committed to the database.
func (t *toTransactions) store(ctx context.Context) error {
	t.progress.storing.Lock()
	defer t.progress.storing.Unlock()
	ctx, cancel := t.storing(ctx)
	defer cancel()
	if t.void != nil {
		return nil // what ended the work is reported where it arose
	}
	return t.copy(ctx)
}

// copy is called with progress.storing.
func (t *toTransactions) copy(ctx context.Context) error {
	if t.at == t.lease.cursor && t.uncopied == 0 && t.journal.copied() {
		return nil
	}
	if err := t.progress.store(ctx, t.at, t.uncopied, t.journal.last); err != nil {
		return err
	}
	t.copied()
	return nil
}

func (t *toTransactions) copied() {
	t.uncopied, t.lease.journal = 0, t.journal.last
	crashpoint.Here(crashpoint.RelayProgressed)
}

// abort ends what was not committed, so that readers need not wait until it times out.
func (t *toTransactions) abort(ctx context.Context) {
	if t.begun.IsZero() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortMax)
	defer cancel()
	err := t.client.AbortBufferedRecords(ctx)
	if err == nil {
		err = t.client.EndTransaction(ctx, kgo.TryAbort)
	}
	if err != nil {
		t.say.warn(ctx, "a transaction was left open; whoever publishes the shard next aborts it", "relay", t.cfg.Name, "shard", t.lease.shard, "error", err)
	}
}

const abortMax = 2 * time.Second
