package idempotency

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/internal/handlertx"
)

// transaction is one transaction of the engine, on a connection of its own. Work gets it as a pgx.Tx that it cannot end.
type transaction struct {
	o      *Operation
	pooled *pgxpool.Conn
	conn   *pgx.Conn // of pooled
	work   *handlertx.Tx
	free   chan struct{} // has one element unless a statement of the work is under way
	over   atomic.Bool   // the work has returned
	fault  atomic.Pointer[error]
	broken atomic.Pointer[error] // of the last statement that failed

	attempts    int  // of the key, with this one
	stray, away bool // a goroutine of the work has the connection; it was lost under the work
}

var (
	errOver   = fmt.Errorf("the transaction of a request is over when its work returns: %w", pgx.ErrTxClosed)
	errEnded  = errors.New("the work ended its transaction by a statement of its own, so that neither its effects nor the key are certain: leave COMMIT and ROLLBACK to the caller")
	errHidden = errors.New("a statement of the work failed, and the work returned no error: nothing behind it was executed, and nothing can be committed")
	errShared = errors.New("the work used its transaction from two goroutines, or while a result was open: use it from one, and close rows first")
)

// Enter implements handlertx.Gate.
func (t *transaction) Enter() error {
	if t.over.Load() {
		return errOver
	}
	select {
	case <-t.free:
	default:
		return t.Misused(errShared)
	}
	if t.ended() { // each statement would be a transaction of its own
		t.Leave(nil)
		return t.Misused(errEnded)
	}
	return nil
}

// ended tells whether the work ended the transaction, by a statement that got past handlertx.
func (t *transaction) ended() bool { return t.conn.PgConn().TxStatus() == 'I' }

// failed tells whether a statement failed, and no savepoint was gone back to.
func (t *transaction) failed() bool { return t.conn.PgConn().TxStatus() == 'E' }

// Failed implements handlertx.Gate.
func (t *transaction) Failed(err error) {
	if code(err) != "25P02" { // which only says that one before failed
		t.broken.Store(&err)
	}
}

// Leave implements handlertx.Gate.
func (t *transaction) Leave(error) {
	select {
	case t.free <- struct{}{}:
	default:
	}
}

// Misused implements handlertx.Gate.
func (t *transaction) Misused(err error) error {
	t.fault.CompareAndSwap(nil, &err)
	return err
}

// begin begins a transaction; what first queues travels with BEGIN.
func (o *Operation) begin(ctx context.Context, first func(batch *pgx.Batch)) (*transaction, error) {
	pooled, err := o.pool.Acquire(ctx)
	if err != nil {
		return nil, fmt.Errorf("get a database connection: %w", err)
	}
	t := &transaction{o: o, pooled: pooled, conn: pooled.Conn(), free: make(chan struct{}, 1)}
	t.free <- struct{}{}
	t.work = handlertx.New(t.conn, t, new(int))
	batch := &pgx.Batch{}
	batch.Queue("BEGIN ISOLATION LEVEL " + string(o.cfg.Isolation))
	first(batch)
	if err := pooled.SendBatch(ctx, batch).Close(); err != nil {
		t.end(ctx)
		return nil, err
	}
	return t, nil
}

// run gives the transaction to the work.
func (t *transaction) run(ctx context.Context, work func(ctx context.Context, tx pgx.Tx) error) error {
	alone := false
	stop := sync.OnceFunc(func() { // also when the work panics
		t.over.Store(true)
		select {
		case <-t.free:
			alone = true
		default:
			t.cut()
		}
	})
	defer stop()
	err := work(ctx, t.work)
	if stop(); !alone {
		t.stray = true
		return errors.Join(errShared, err)
	}
	t.away = t.conn.IsClosed()
	if t.conn.PgConn().IsBusy() {
		return errors.Join(errShared, err)
	}
	if fault := t.fault.Load(); fault != nil {
		return errors.Join(*fault, err) // what the work knows of other systems counts all the same
	}
	if t.ended() { // COMMIT would say yes, with a warning, and nothing would be stored
		return errors.Join(errEnded, err)
	}
	if !t.failed() {
		return err
	}
	if err == nil {
		err = errHidden
	}
	if broken := t.broken.Load(); broken != nil && conflict(*broken) && !conflict(err) { // which the work hid
		return errors.Join(err, *broken)
	}
	return err
}

// cut ends what a goroutine that the work left behind does on the connection, which must not end up in the next transaction there.
func (t *transaction) cut() {
	_ = t.conn.PgConn().Conn().Close() // of the socket, which may be done beside a statement
	timer := time.NewTimer(rollbackMax)
	defer timer.Stop()
	select {
	case <-t.free:
	case <-timer.C:
	}
}

// commit ends the transaction with what last queues, in one round trip: if one of the statements fails, the server
// skips the COMMIT behind it, and the transaction stays, failed, for replace. It is not cut short with ctx: pgx would send
// a cancel request, which makes a COMMIT that waits for a synchronous standby visible without being replicated. One that
// the server does not answer is left to itself.
func (t *transaction) commit(ctx context.Context, last func(batch *pgx.Batch)) error {
	batch := &pgx.Batch{}
	last(batch)
	var tag string
	batch.Queue("COMMIT").Query(func(rows pgx.Rows) error {
		rows.Close()
		tag = rows.CommandTag().String()
		return rows.Err()
	})
	conn, pooled := t.conn, t.pooled
	t.pooled = nil
	done, left := make(chan error, 1), atomic.Bool{}
	go func() {
		err := conn.SendBatch(context.WithoutCancel(ctx), batch).Close()
		switch {
		case err == nil && tag != "COMMIT":
			err = pgx.ErrTxCommitRollback
		case err != nil && conn.IsClosed(): // asked here: behind Release the connection is somebody else's
			err = fmt.Errorf("%w (%w)", ErrUnanswered, err)
		case err != nil && t.failed() && left.CompareAndSwap(false, true):
			done <- failedEarly{err}
			return
		}
		if err != nil {
			rollback(ctx, conn)
		}
		pooled.Release() // before the caller goes on, and wants it again
		done <- err
	}()
	timer := time.NewTimer(t.o.cfg.StatementTimeout + commitGrace)
	defer timer.Stop()
	var err error
	select {
	case err = <-done:
	case <-timer.C:
		if left.CompareAndSwap(false, true) {
			return ErrUnanswered
		}
		err = <-done
	}
	if early, ok := err.(failedEarly); ok { //nolint:errorlint // it is not wrapped
		t.pooled = pooled
		return early.error
	}
	return err
}

// failedEarly is the error of a statement before COMMIT.
type failedEarly struct{ error }

const (
	commitGrace = 5 * time.Second // beyond what the server itself allows the statements before COMMIT
	rollbackMax = 5 * time.Second
)

// end rolls back what was not committed.
func (t *transaction) end(ctx context.Context) {
	if t.pooled == nil {
		return
	}
	rollback(ctx, t.pooled.Conn())
	t.pooled.Release()
	t.pooled = nil
}

// rollback leaves a connection that does not answer to the pool, which closes it, and to the server, which rolls back.
func rollback(ctx context.Context, conn *pgx.Conn) {
	if conn.IsClosed() || conn.PgConn().TxStatus() == 'I' {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackMax)
	defer cancel()
	_, _ = conn.Exec(ctx, "ROLLBACK")
}

// durably executes one statement in a transaction of its own that is durable when it returns, whatever the role's
// synchronous_commit is, and tells how many rows it changed.
func (o *Operation) durably(ctx context.Context, sql string, args ...any) (int64, error) {
	var rows int64
	t, err := o.unclaimed(ctx)
	if err != nil {
		return 0, err
	}
	defer t.end(ctx)
	err = t.commit(ctx, func(batch *pgx.Batch) {
		batch.Queue(sql, args...).Exec(func(tag pgconn.CommandTag) error {
			rows = tag.RowsAffected()
			return nil
		})
	})
	if err != nil {
		return 0, err // rows may still be written
	}
	return rows, nil
}

// limits bounds the statements of a transaction, and how long they wait for locks.
func (o *Operation) limits(batch *pgx.Batch, lockTimeout time.Duration) {
	batch.Queue(o.sql.settings, millis(o.cfg.StatementTimeout), millis(lockTimeout), millis(o.cfg.IdleTimeout))
}

// unclaimed begins a transaction that takes no key.
func (o *Operation) unclaimed(ctx context.Context, then ...string) (*transaction, error) {
	return o.begin(ctx, func(batch *pgx.Batch) {
		o.limits(batch, o.cfg.LockTimeout)
		for _, sql := range then {
			batch.Queue(sql)
		}
	})
}

func millis(d time.Duration) string { return strconv.FormatInt(max(1, d.Milliseconds()), 10) }
