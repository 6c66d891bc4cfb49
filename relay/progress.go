package relay

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/pgerr"
)

// progress is the place of a shard, stored in the database as a chain of rows in outbox_advances.
// Each write inserts the next number of the chain, so the primary key is the compare-and-set. The
// next holder of the shard also began with a number, so the insert of a holder without its lease
// finds its number taken. Nothing is updated: an old snapshot in the database, which keeps dead
// versions, makes no write slower.
type progress struct {
	*Relay
	lease *lease

	storing sync.Mutex // one write at a time: an older write must not follow a newer one
	rows    int64      // rows whose progress this value has stored

	seqRead atomic.Int64 // the last number that a poll saw
}

// passing finds the seqLast of ticks. A batch is the rows that became visible between two snapshots. A row
// is found by its seq or by its transaction. For that each tick has a number seqLast, up to which every row
// has a transaction id *below the snapshot's xmax*: such a transaction has ended in the snapshot, or it is
// in the snapshot's list of open ones. The last value of the sequence at the time of the snapshot would be
// wrong:
//
//	transaction 100 gets its id, and seq 7                 (last value: 7)
//	a snapshot is taken: its xmax is 100, not 101, since
//	no transaction from 100 on has ended. 100 is not in its list, which ends at xmax.
//	With seqLast = 7 the next poll would search seq > 7 and the listed transactions:
//	row 7 would be lost.
//
// So a poll reads the sequence, and then the next transaction id. Row 7 got its transaction id before its
// seq (outbox.txid is the first column with a default), so that id is smaller. A later snapshot whose xmax
// has reached the next id has passed the number. In the example: 7, and then 101. Writes of progress are
// transactions, too, so the numbers are passed soon. The transaction that takes the lease passes what was
// read before it.
type passing struct {
	waiting []numbered // numbers that no snapshot is known to have passed yet, in order
	safe    int64      // the largest number that was passed
}

// numbered is a number, and the transaction id that was the next one when the number was known.
type numbered struct {
	seq  int64
	next uint64
}

// passingMax bounds the waiting numbers: while the transaction with the latest id is open, no
// number is passed.
const passingMax = 8

func (p *passing) saw(seq int64, next uint64) {
	switch n := len(p.waiting); {
	case n > 0 && p.waiting[n-1].next == next, n == passingMax:
		p.waiting[n-1] = numbered{seq, next}
	default:
		p.waiting = append(p.waiting, numbered{seq, next})
	}
}

// below returns the largest number up to which every row has a transaction id below a snapshot's
// xmax.
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
	p.seqRead.Store(l.seq)
	return p
}

// store writes progress in a statement of its own. The caller holds storing.
func (p *progress) store(ctx context.Context, end cursor, rows int64, journal *int64) error {
	if err := p.ticks(ctx, end); err != nil {
		return err
	}
	err := p.insert(ctx, p.pool, end, rows, journal)
	if err == nil {
		p.committed(end, rows)
	}
	return err
}

// ticks makes sure that the ticks of a cursor have numbers. It stores them outside of a
// transaction: a rollback must not remove a number that the tick remembers.
func (p *progress) ticks(ctx context.Context, end cursor) error {
	return errors.Join(p.storeTick(ctx, p.pool, end.from), p.storeTick(ctx, p.pool, end.to))
}

// insert adds the next row of the chain. If db is a transaction, the caller calls committed after its
// commit.
func (p *progress) insert(ctx context.Context, db execer, end cursor, rows int64, journal *int64) error {
	to, token := end.to.ref()
	tag, err := db.Exec(ctx, p.sql.of(advanceSQL), p.lease.cluster.run, p.cfg.Name, p.lease.shard, p.lease.n+1, p.lease.epoch,
		end.from.id, to, end.seq, end.floor, p.lease.published+rows, journal, end.from.token, token)
	switch {
	case pgerr.Is(err, pgerr.UniqueViolation):
		return errLeaseLost
	case err != nil:
		return fmt.Errorf("store progress: %w", err)
	case tag.RowsAffected() == 0:
		return errAnotherRun
	}
	return nil
}

func (p *progress) committed(end cursor, rows int64) {
	p.lease.n++
	p.lease.cursor, p.lease.made, p.lease.published = end, p.lease.epoch, p.lease.published+rows
	p.rows += rows
	if p.cfg.Hooks.Published != nil && rows > 0 {
		p.cfg.Hooks.Published(rows)
	}
}

// clearEvery is how many rows of a chain collect before old ones are deleted. As many stay, for
// operators.
const clearEvery = 1000

// clear deletes old rows of the chain. It starts where the last call ended: an old snapshot keeps
// deleted rows, and an index scan from the beginning would visit all of them.
func (p *progress) clear(ctx context.Context) error {
	l := p.lease
	p.storing.Lock()
	defer p.storing.Unlock()
	if l.n-l.cleared < 2*clearEvery {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.cfg.Lease)
	defer cancel()
	if _, err := p.pool.Exec(ctx, p.sql.of(clearAdvancesSQL), p.cfg.Name, l.shard, l.cleared, l.n-clearEvery); err != nil {
		return fmt.Errorf("remove old progress: %w", err)
	}
	l.cleared = l.n - clearEvery
	return nil
}

// storing is the context of a write of progress: rows that were acknowledged before a stop are
// stored after it. The limit starts when the lock is held, since waiting for the lock may include a
// wait for the brokers.
func (p *publisher) storing(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), p.cfg.Lease)
}

// storeAcked writes progress behind the acknowledged prefix. It also works after ctx has ended:
// that is the last write of a clean stop.
func (p *publisher) storeAcked(ctx context.Context) error {
	p.progress.storing.Lock()
	defer p.progress.storing.Unlock()
	ctx, cancel := p.storing(ctx)
	defer cancel()
	if !p.flight.state().movable {
		return nil // rows may be acknowledged beside a dead row: moveToDead counts them
	}
	end, rows := p.flight.takeProgress()
	crashpoint.Here(crashpoint.RelayAcknowledged)
	if err := p.progress.store(ctx, *end, rows, nil); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.RelayProgressed)
	return nil
}

// Each statement has a limit. A connection can be silent forever (a stopped backend, a network that
// drops packets, a lock of another session) while others, which renew the leases, work. Without a
// limit nothing would be published, and no replica would take over. A statement that hits its limit
// is retried on another connection.
const (
	patienceMin = time.Minute
	// After each failure, a statement that is only slow gets twice the time. This is how often.
	patienceGrows = 4
)

var errNoAnswer = errors.New("the database does not answer on this connection, or another session locks the table")

func (c *Config) patience() time.Duration { return max(c.Lease, patienceMin) }

// patient is the context of a statement of the work on a shard.
func (p *publisher) patient(ctx context.Context) (context.Context, context.CancelFunc) {
	return p.limited(ctx, p.patience, errNoAnswer)
}

// limited is the context of a wait that ends by itself.
func (p *publisher) limited(ctx context.Context, limit time.Duration, cause error) (context.Context, context.CancelFunc) {
	ended := p.expect(limit)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, cause)
	return ctx, func() { cancel(); ended() }
}

// silence marks the error of a statement that took longer than its limit.
func silence(ctx context.Context, err error) error {
	if errors.Is(context.Cause(ctx), errNoAnswer) {
		return fmt.Errorf("%w: %w", errNoAnswer, err)
	}
	return err
}

// transact runs fn in a transaction. The transaction ends after a Lease if the process freezes
// inside it or is cut off. It waits for another session's lock as long as a statement may. Read
// committed, whatever the role's default is: what fn reads must be newer than its locks.
func (r *Relay) transact(ctx context.Context, fn func(pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, r.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, lockSettingsSQL, milliseconds(r.patience), milliseconds(r.cfg.Lease)); err != nil {
			return err
		}
		return fn(tx)
	})
}
