package relay

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/crashpoint"
)

// toTransactions publishes exactly once: records and progress are in one Kafka transaction.
// Progress is a record of the journal. The chain in the database is a copy of it, written every
// ProgressEvery, for retention and for operators.
type toTransactions struct {
	*publisher
	journal *journal

	begun    time.Time // start of the open transaction; zero: there is none
	end      cursor    // behind what was handed over last
	handed   int64     // rows of the transaction
	released []int64   // dead rows that the transaction publishes
	dead     []deadRow // dead rows that the transaction skips

	sure   *int64 // the offset in the journal that the last dead rows were stored with; nil: none
	at     cursor // the last committed cursor
	rows   int64  // all rows that were ever committed
	failed error  // set once a commit failed or its outcome is unknown; no further commit is attempted
	// Rows that are committed and not yet copied to the database. Guarded by progress.storing, like
	// failed.
	uncopied int64
}

// begin fences the previous publisher of this shard, aborts its open transaction, and continues
// from the last committed progress.
func (t *toTransactions) begin(ctx context.Context) error {
	t.journal, t.rows, t.at = &journal{publisher: t.publisher, written: time.Now()}, t.lease.published, t.lease.cursor
	asking, cancel := t.asking(ctx)
	err := t.journal.prepare(asking, t.client)
	if err == nil {
		_, _, err = t.client.ProducerID(asking)
	}
	if cancel(); err != nil {
		return fmt.Errorf("begin transactions as %q: %w", t.transactionalID(t.lease), fromOutlet(err))
	}
	ended := t.expect(t.cfg.patience()) // in addition to the waits in which read gives signs of life
	found, err := t.journal.read(ctx, t.client, t.lease.journal)
	ended()
	if err != nil {
		return fmt.Errorf("read progress topic %q: %w", t.cfg.ProgressTopic, fromOutlet(err))
	}
	if found == nil {
		if t.lease.journal != nil {
			t.say.warn(ctx, "the progress topic has lost this shard's progress, or is new: the relay continues from the database's copy, so consumers may see duplicates",
				"relay", t.cfg.Name, "shard", t.lease.shard, "topic", t.cfg.ProgressTopic)
		}
		return nil
	}
	if _, err := t.lease.cluster.movedFrom(cluster{system: found.System, timeline: found.Timeline}); err != nil {
		return fmt.Errorf("progress topic %q: %w; or, if an older state of the database was restored on purpose, give the relay another progress topic", t.cfg.ProgressTopic, err)
	}
	if t.sure = t.lease.journal; !found.after(t.lease) {
		return nil
	}
	return t.adopt(ctx, found)
}

// adopt continues from progress in Kafka that is ahead of the database's copy.
func (t *toTransactions) adopt(ctx context.Context, found *entry) error {
	at, err := found.cursor()
	if err != nil {
		return fmt.Errorf("progress topic %q, offset %d: %w", t.cfg.ProgressTopic, found.offset, err)
	}
	remembered, err := t.journal.remembered(ctx, at)
	if err != nil {
		return fmt.Errorf("look for the ticks of progress topic %q: %w", t.cfg.ProgressTopic, err)
	}
	if has := t.lease.journal; !remembered || found.Sure != nil && (has == nil || *has < *found.Sure) {
		t.cfg.Logger.ErrorContext(ctx, "the database went back behind what was published, to a backup, a dump, or a standby that lagged: the relay continues from the database's progress, so consumers will see duplicates",
			"relay", t.cfg.Name, "shard", t.lease.shard)
		return nil
	}
	rows := found.Published - t.lease.published
	t.cfg.Logger.InfoContext(ctx, "progress is taken from Kafka, which is ahead of the database's copy", "relay", t.cfg.Name, "shard", t.lease.shard, "rows", rows)
	t.at, t.rows = at, found.Published
	t.reader.from(at)
	if err := t.publisher.dead.remove(ctx, found.Revived, nil); err != nil {
		return err
	}
	t.lease.journal = t.journal.last // nothing else stores progress yet
	if err := t.storeDead(ctx, found.verdicts(), t.at, rows, t.journal.last); err != nil {
		return err
	}
	t.sure = t.journal.last
	return t.checkSequences(ctx) // the check before the lease did not know the numbers that Kafka knows
}

// publish adds the rows to the transaction. A transaction with dead rows, or with released rows, is
// committed at once. Dead rows move to outbox_dead after the commit, together with the copy of
// progress, and the next page must find them there. They must not move before the commit: the next
// holder, which continues from the progress before it, would publish them both from outbox_dead and
// from the outbox, and an operator could discard a row that is read again.
func (t *toTransactions) publish(work, ctx context.Context, a *attempt) error {
	care := t.care(a.released)
	careful := care.left.Load() > 0
	if care.alone() {
		if err := t.tryEach(work, ctx, a, t.tryOne); err != nil {
			return err
		}
		if err := t.handEach(ctx, a.records); err != nil {
			return err
		}
		a.records = nil
	}
	if err := t.hand(&batch{rows: a.rows, records: a.records, bytes: a.bytes, end: a.end, released: a.released}); err != nil {
		return err
	}
	switch {
	case a.released:
		t.released = seqs(a.rows)
	case len(a.dead) > 0 || careful:
		t.dead = a.dead
		if err := t.open(); err != nil { // the journal names dead rows
			return err
		}
	default:
		return nil
	}
	if err := t.commit(work, ctx); err != nil {
		return err
	}
	care.passed(len(a.rows) + len(a.dead))
	if !a.released {
		return nil
	}
	if len(a.rows) > 0 {
		t.cfg.Logger.InfoContext(ctx, "dead rows were published", "relay", t.cfg.Name, "rows", len(a.rows))
	}
	return t.publisher.dead.holdAgain(ctx, a.dead)
}

// tryOne tries a record in a transaction of its own, which is aborted.
func (t *toTransactions) tryOne(ctx context.Context, record *kgo.Record) error {
	if err := t.open(); err != nil {
		return err
	}
	err := t.one(ctx, record)
	limit := transactionTimeout
	if ctx.Err() != nil {
		limit = abortMax
	}
	return cmp.Or(t.abort(ctx, limit), err)
}

// handEach adds records to the transaction one by one: the topic may take no batch of several.
func (t *toTransactions) handEach(ctx context.Context, records []*kgo.Record) error {
	for _, record := range records {
		if err := t.open(); err != nil {
			return err
		}
		if err := t.one(ctx, record); err != nil {
			return produceError(record.Topic, err)
		}
	}
	return nil
}

// hand adds a batch to the transaction, which begins with the first record.
func (t *toTransactions) hand(b *batch) error {
	if len(b.records) > 0 {
		if err := t.open(); err != nil {
			return err
		}
	}
	if b.end.from != nil {
		t.end = b.end
	}
	t.handed += int64(len(b.rows))
	t.send(b)
	return nil
}

// afterPage ends the transaction, unless time is left: the whole TransactionMax if more rows wait, else
// half of it.
func (t *toTransactions) afterPage(work, ctx context.Context, full bool) (time.Duration, error) {
	most := t.cfg.TransactionMax
	if !full && !t.once {
		most /= 2
	}
	if left := most - time.Since(t.begun); left > 0 && (full || !t.once) {
		return left, nil
	}
	if t.begun.IsZero() && time.Since(t.journal.written) > journalEvery {
		if err := t.open(); err != nil {
			return 0, err
		}
	}
	return t.cfg.PollMax, t.commit(work, ctx)
}

func (t *toTransactions) finish(work, ctx context.Context) error {
	if err := t.commit(work, ctx); err != nil {
		return err
	}
	return t.store(ctx)
}

// open begins a transaction unless one is open.
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

// commit ends the open transaction, with progress behind all of its rows. It first waits for
// everything in flight. After that it no longer ends with ctx, only with work and with its time
// limit: an interrupted transaction is void, unless the journal says that it was committed.
func (t *toTransactions) commit(work, ctx context.Context) error {
	t.progress.storing.Lock()
	defer t.progress.storing.Unlock()
	if t.failed != nil {
		return t.failed
	}
	if t.end.from == nil { // released rows do not move progress
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
	t.failed = t.commitPrepared(work)
	return t.failed
}

// prepare makes durable everything that a commit needs. It stores the ticks, and with them every
// commit that they saw, before Kafka knows of them: a server that crashes and loses commits must
// not assign their transaction ids again behind a tick. At the same time the brokers store the
// rows, and then the progress record with them. prepare can be called again after an interruption:
// of several progress records in one transaction the last one counts.
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
	return err
}

func (t *toTransactions) commitPrepared(ctx context.Context) error {
	t.flight.takeProgress()
	if !t.begun.IsZero() {
		if !t.lease.held() {
			return errLeaseLost
		}
		crashpoint.Here(crashpoint.RelayAcknowledged)
		ended := t.expect(transactionTimeout)
		// Nothing is buffered. AbortBufferedRecords waits for the client's metadata request for a
		// new topic, which may still be about to register the topic's partitions (under
		// unknownTopicsMu, which the call takes). Without the wait, the end of the transaction
		// would not reset their sequence numbers, and the next transaction would end with
		// OUT_OF_ORDER_SEQUENCE_NUMBER (franz-go 1.22.2).
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
		offset := t.journal.wrote
		t.journal.last, t.journal.written = &offset, time.Now()
	}
	t.at, t.rows, t.uncopied, t.handed = t.end, t.rows+t.handed, t.uncopied+t.handed, 0
	if err := t.publisher.dead.remove(ctx, t.released, nil); err != nil {
		return err
	}
	t.released = nil
	if len(t.dead) == 0 {
		return nil // store copies progress later
	}
	if err := t.storeDead(ctx, columns(t.dead), t.at, t.uncopied, t.journal.last); err != nil {
		return err
	}
	t.copied()
	t.sure = t.journal.last
	t.publisher.dead.moved(ctx, t.dead)
	t.dead = nil
	return nil
}

// store copies committed progress to the database.
func (t *toTransactions) store(ctx context.Context) error {
	t.progress.storing.Lock()
	defer t.progress.storing.Unlock()
	ctx, cancel := t.storing(ctx)
	defer cancel()
	if t.failed != nil {
		return nil // the error that ended the work is reported where it occurred
	}
	return t.copy(ctx)
}

// copy copies committed progress to the database. The caller holds progress.storing.
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

// abort aborts the open transaction, so that readers need not wait until it times out. If that fails, it
// must not be committed.
func (t *toTransactions) abort(ctx context.Context, limit time.Duration) error {
	if t.begun.IsZero() {
		return nil
	}
	defer t.expect(limit)()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	err := t.client.AbortBufferedRecords(ctx)
	if err == nil {
		err = t.client.EndTransaction(ctx, kgo.TryAbort)
	}
	if err != nil {
		t.progress.storing.Lock()
		defer t.progress.storing.Unlock()
		t.failed = fmt.Errorf("abort a transaction: %w", fromOutlet(err))
		return t.failed
	}
	t.begun = time.Time{}
	return nil
}

const abortMax = 2 * time.Second
