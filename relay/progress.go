package relay

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/effectonce/effectonce/internal/crashpoint"
)

// progress is where a shard is, in the database: a chain of rows in outbox_advances. Each write inserts the next number
// of the chain, so that the primary key is the compare-and-set: the next holder of the shard began with a number, too, and
// what a holder without its lease inserts finds its number taken. Nothing is updated, so an old snapshot in the
// database, which keeps dead versions, makes no write slower.
//
// # Which rows a snapshot has passed: seqSafe
//
// A batch is the rows that became visible between two snapshots, and a row is found by its seq or by its transaction. For
// that each tick has a number seqLast, up to which every row has a transaction id *below the snapshot's xmax*: such a
// transaction is over in the snapshot, or it is in its list of open ones. The last value of the sequence at the time of the
// snapshot would be wrong:
//
//	transaction 100 gets its id, and seq 7                 (last value: 7)
//	a snapshot is taken: its xmax is 100, not 101, since
//	no transaction from 100 on has ended. 100 is not in its list, which ends at xmax.
//	With seqLast = 7 the next look would search seq > 7 and the listed transactions: row 7 would be lost.
//
// So seqLast is a number that was read *before* something of which it is known that it ended: a transaction of ours that
// wrote, and therefore got an id, and committed. Row 7 got its transaction id before its seq (outbox.txid is the first column
// with a default), so before the sequence said 7, so before our transaction got its id, which is therefore larger
// than 100; and once ours has ended, each new snapshot has an xmax above it. Writing progress is such a
// transaction, and taking the lease is one, too: seqRead is what the last look saw, seqSafe what it was before the last write.
//
// Writes of others do as well, and come more often: a look reads the sequence, and then which transaction id is the next one.
// Each row up to that number got its transaction id before, so a smaller one; any snapshot whose xmax has reached it will do.
// In the example: 7, and then 101. See passing.
type progress struct {
	*Relay
	lease *lease

	storing sync.Mutex // one write at a time: an older one must not land after a newer
	rows    int64      // whose progress this value stored

	seqRead, seqSafe atomic.Int64
}

// passing are numbers of the sequence that no snapshot is known to have passed yet, each with the transaction id that was the
// next one when the number was known, in order.
type passing struct {
	waiting []numbered
	safe    int64 // the largest number that was passed
}

type numbered struct {
	seq  int64
	next uint64
}

// passingMax bounds what waits: while the transaction with the latest id is open, nothing is passed.
const passingMax = 8

func (p *passing) saw(seq int64, next uint64) {
	switch n := len(p.waiting); {
	case n > 0 && p.waiting[n-1].next == next, n == passingMax:
		p.waiting[n-1] = numbered{seq, next}
	default:
		p.waiting = append(p.waiting, numbered{seq, next})
	}
}

// below returns the largest number up to which every row has a transaction id below a snapshot's xmax.
func (p *passing) below(xmax uint64) int64 {
	n := 0
	for ; n < len(p.waiting) && p.waiting[n].next <= xmax; n++ {
		p.safe = max(p.safe, p.waiting[n].seq)
	}
	p.waiting = p.waiting[:copy(p.waiting, p.waiting[n:])]
	return p.safe
}

func newProgress(r *Relay, l *lease) *progress {
	p := &progress{Relay: r, lease: l}
	p.seqSafe.Store(l.seq)
	p.seqRead.Store(l.seq)
	return p
}

// advanced is a write of progress that is not known to be committed yet.
type advanced struct {
	at   cursor
	rows int64
	seq  int64
}

// store writes progress on its own. The caller holds storing.
func (p *progress) store(ctx context.Context, end cursor, rows int64, journal *int64) error {
	if err := p.ticks(ctx, end); err != nil {
		return err
	}
	a, err := p.insert(ctx, p.pool, end, rows, journal)
	if err != nil {
		return err
	}
	p.committed(a)
	return nil
}

// ticks makes sure that the ticks of a cursor have numbers. On their own: the rollback of a transaction must not take
// back a number that the tick remembers.
func (p *progress) ticks(ctx context.Context, end cursor) error {
	return errors.Join(p.storeTick(ctx, p.pool, end.from), p.storeTick(ctx, p.pool, end.to))
}

// insert adds the next row of the chain. If db is a transaction the caller says committed when it is.
func (p *progress) insert(ctx context.Context, db execer, end cursor, rows int64, journal *int64) (advanced, error) {
	a := advanced{at: end, rows: rows, seq: p.seqRead.Load()}
	var to *int64
	if end.to != nil {
		to = &end.to.id
	}
	tag, err := db.Exec(ctx, p.sql.advance, p.lease.cluster.run, p.cfg.Name, p.lease.shard, p.lease.n+1, p.lease.epoch,
		end.from.id, to, end.seq, end.floor, p.lease.stored.published+rows, journal)
	var refusal *pgconn.PgError
	switch {
	case errors.As(err, &refusal) && refusal.Code == "23505":
		return a, errLeaseLost
	case err != nil:
		return a, fmt.Errorf("store progress: %w", err)
	case tag.RowsAffected() == 0:
		return a, errAnotherRun
	}
	return a, nil
}

func (p *progress) committed(a advanced) {
	p.lease.n++
	p.lease.cursor, p.lease.stored = a.at, progressed{epoch: p.lease.epoch, published: p.lease.stored.published + a.rows}
	p.seqSafe.Store(a.seq)
	p.rows += a.rows
	if p.cfg.Hooks.Published != nil && a.rows > 0 {
		p.cfg.Hooks.Published(a.rows)
	}
}

// clearEvery is how many rows of a chain are left to gather before the old ones are deleted; so many stay, for people.
const clearEvery = 1000

// clear deletes old rows of the chain. It walks from where the last call ended: an old snapshot keeps what was deleted, and
// an index scan from the beginning would visit all of it.
func (p *progress) clear(ctx context.Context) error {
	l := p.lease
	p.storing.Lock()
	defer p.storing.Unlock()
	if l.n-l.cleared < 2*clearEvery {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.cfg.Lease)
	defer cancel()
	if _, err := p.pool.Exec(ctx, p.sql.clearAdvances, p.cfg.Name, l.shard, l.cleared, l.n-clearEvery); err != nil {
		return fmt.Errorf("remove old progress: %w", err)
	}
	l.cleared = l.n - clearEvery
	return nil
}

// resume brings a lease that is held up to date with what is stored: the outcome of its last write may be unknown.
func (r *Relay) resume(ctx context.Context, l *lease) error {
	ctx, cancel := context.WithTimeoutCause(ctx, r.patience, errNoAnswer)
	defer cancel()
	var from int64
	var to *int64
	var c cursor
	var n int64
	var stored progressed
	var journal *int64
	err := r.pool.QueryRow(ctx, r.sql.resume, l.cluster.run, r.cfg.Name, l.shard, l.epoch).
		Scan(&n, &from, &to, &c.seq, &c.floor, &stored.epoch, &stored.published, &journal)
	if errors.Is(err, pgx.ErrNoRows) {
		return errLeaseLost
	}
	if err != nil {
		return fmt.Errorf("read progress: %w", silence(ctx, err))
	}
	if c.from, err = r.loadTick(ctx, l.cluster.run, from); err != nil {
		return silence(ctx, err)
	}
	if to != nil {
		if c.to, err = r.loadTick(ctx, l.cluster.run, *to); err != nil {
			return silence(ctx, err)
		}
	}
	l.n, l.cursor, l.stored, l.journal = n, c, stored, journal
	return nil
}

// storing is the context of a write of progress: what was acknowledged before a stop is stored after it. The limit counts from
// when the lock is held, since that may wait for the brokers.
func (p *publisher) storing(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), p.cfg.Lease)
}

// storeAcked writes progress behind the acknowledged prefix. It also works when ctx has ended: that is the last
// write of a clean stop.
func (p *publisher) storeAcked(ctx context.Context) error {
	p.progress.storing.Lock()
	defer p.progress.storing.Unlock()
	ctx, cancel := p.storing(ctx)
	defer cancel()
	if !p.flight.state().movable {
		return nil // rows may be acknowledged beside a dead one: they are counted with it
	}
	end, rows := p.flight.take()
	crashpoint.Here(crashpoint.RelayAcknowledged)
	if err := p.progress.store(ctx, *end, rows, nil); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.RelayProgressed)
	return nil
}
