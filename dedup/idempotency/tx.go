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
	"github.com/effectonce/effectonce/internal/pgerr"
)

// transaction is one transaction of the engine, on a connection of its own. The work gets it as a
// pgx.Tx that it cannot end.
type transaction struct {
	o      *Operation
	pooled *pgxpool.Conn
	conn   *pgx.Conn // of pooled
	work   *handlertx.Tx
	free   chan struct{} // has one element unless a statement of the work is under way
	over   atomic.Bool   // the work has returned; Enter fails
	fault  atomic.Pointer[error]
	broken atomic.Pointer[error] // error of the last statement that failed

	guarded     bool   // see handlertx.GuardSQL
	stray, away bool   // stray: a goroutine of the work has the connection; away: it was lost during the work
	changed     bool   // the work changed its settings, or its role
	role        string // at the beginning
	lasting     bool   // and the session: the connection is not used again
}

var (
	errOver   = fmt.Errorf("the transaction of a request is over when its work returns: %w", pgx.ErrTxClosed)
	errEnded  = errors.New("the work ended its transaction by a statement of its own, or closed its cursors: nothing of the transaction is stored; leave COMMIT and ROLLBACK to the caller")
	errHidden = errors.New("a statement of the work failed, and the work returned no error: no later statement was executed, and nothing can be committed")
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
	if t.ended() { // each later statement would be a transaction of its own
		t.Leave(nil)
		return t.Misused(errEnded)
	}
	return nil
}

// ended reports whether the work ended the transaction, by a statement that got past handlertx.
func (t *transaction) ended() bool { return t.conn.PgConn().TxStatus() == 'I' }

// failed reports whether a statement failed, and the work did not roll back to a savepoint.
func (t *transaction) failed() bool { return t.conn.PgConn().TxStatus() == 'E' }

// Failed implements handlertx.Gate.
func (t *transaction) Failed(err error) {
	if !pgerr.Is(err, pgerr.FailedTransaction) { // that error only reports that an earlier statement failed
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

// Statement implements handlertx.Gate. What the work changes of its session must not reach other requests.
func (t *transaction) Statement(sql string) {
	changes, lasts := handlertx.Session(sql)
	t.changed, t.lasting = t.changed || changes, t.lasting || lasts
}

// Misused implements handlertx.Gate.
func (t *transaction) Misused(err error) error {
	t.fault.CompareAndSwap(nil, &err)
	return err
}

// begin begins a transaction, with bounds for its statements and for how long they wait for locks. The
// statements that first queues are sent with BEGIN. guarded: it is for work.
func (o *Operation) begin(ctx context.Context, lockTimeout time.Duration, guarded bool, first func(batch *pgx.Batch)) (*transaction, error) {
	pooled, err := o.pool.Acquire(ctx)
	if err != nil {
		return nil, fmt.Errorf("get a database connection: %w", err)
	}
	t := &transaction{o: o, pooled: pooled, conn: pooled.Conn(), free: make(chan struct{}, 1), guarded: guarded}
	t.free <- struct{}{}
	t.work = handlertx.New(t.conn, t, new(int))
	batch := &pgx.Batch{}
	batch.Queue("BEGIN ISOLATION LEVEL " + string(o.cfg.Isolation))
	o.queueLimits(batch, lockTimeout).QueryRow(func(row pgx.Row) error { return row.Scan(nil, nil, nil, nil, &t.role) })
	if guarded { // before the savepoint, which would undo it
		batch.Queue(o.sql[handlertx.GuardSQL])
	}
	first(batch)
	if err := o.send(ctx, pooled, batch); err != nil {
		t.end(ctx)
		return nil, err
	}
	return t, nil
}

// queueLimits bounds the statements behind it in a transaction, and how long they wait for locks.
func (o *Operation) queueLimits(batch *pgx.Batch, lockTimeout time.Duration) *pgx.QueuedQuery {
	return batch.Queue(o.sql[settingsSQL], millis(o.cfg.StatementTimeout), millis(lockTimeout), millis(o.cfg.IdleTimeout))
}

// send sends the first statements of a transaction in one round trip, which is bounded.
func (o *Operation) send(ctx context.Context, conn *pgxpool.Conn, batch *pgx.Batch) error {
	// The server's limits do not hold yet while the driver prepares statements on a table that is locked.
	limited, cancel := context.WithTimeout(ctx, o.cfg.LockTimeout+claimGrace)
	defer cancel()
	err := conn.SendBatch(limited, batch).Close()
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		err = fmt.Errorf("no answer within Config.LockTimeout (%v) and some seconds: another session locks idempotency_keys, or the database does not answer (%v)", o.cfg.LockTimeout, err) //nolint:errorlint // no deadline of the caller
	}
	return err
}

// claim sends the statements that queue queues, which claim the key of a flow, or take it over.
func (o *Operation) claim(ctx context.Context, key Key, queue func(batch *pgx.Batch)) error {
	conn, err := o.pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("get a database connection: %w", err)
	}
	defer conn.Release()
	batch := &pgx.Batch{} // one transaction without BEGIN
	o.queueLimits(batch, min(claimWait, o.cfg.WaitMax))
	queue(batch)
	return claimed(ctx, key, o.send(ctx, conn, batch))
}

// runWork runs the work in the transaction.
func (t *transaction) runWork(ctx context.Context, work func(ctx context.Context, tx pgx.Tx) error) error {
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
		return errors.Join(*fault, err) // err counts too: the work may report on other systems (Final, Indeterminate)
	}
	if t.ended() { // COMMIT would succeed with a warning, and store nothing
		return errors.Join(errEnded, err)
	}
	if !t.failed() {
		if err == nil && t.changed { // in a round trip of its own: the driver prepares a batch before it executes any of it
			batch := &pgx.Batch{}
			batch.Queue("SELECT pg_catalog.set_config('role', $1, true)", t.role)
			t.o.queueLimits(batch, t.o.cfg.LockTimeout)
			err = t.o.send(ctx, t.pooled, batch)
		}
		return err
	}
	if err == nil {
		err = errHidden
	}
	if broken := t.broken.Load(); broken != nil && conflict(*broken) && !conflict(err) { // the work hid the conflict
		return errors.Join(err, *broken)
	}
	return err
}

// cut interrupts the statement of a goroutine that the work left behind: it must not run in the
// next transaction on the connection.
func (t *transaction) cut() {
	_ = t.conn.PgConn().Conn().Close() // closing the socket is safe during a statement
	timer := time.NewTimer(rollbackMax)
	defer timer.Stop()
	select {
	case <-t.free:
	case <-timer.C:
	}
}

// commit ends the transaction with the statements that last queues, in one round trip. If one of
// them fails, the server skips the COMMIT, and the transaction stays open, failed, for replace. The
// end of ctx does not interrupt it: pgx would send a cancel request, which makes a COMMIT that
// waits for a synchronous standby visible without being replicated. If the server does not answer
// in time, commit returns and leaves the connection to a goroutine.
func (t *transaction) commit(ctx context.Context, last func(batch *pgx.Batch)) error {
	batch := &pgx.Batch{}
	last(batch)
	if t.guarded {
		batch.Queue(handlertx.CloseGuardSQL)
	}
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
		if handlertx.Ended(err) {
			err = errors.Join(errEnded, err)
		}
		switch {
		case err == nil && tag != "COMMIT":
			err = pgx.ErrTxCommitRollback
		case err != nil && conn.IsClosed(): // checked here: after Release the connection belongs to others
			err = fmt.Errorf("%w (%w)", ErrUnanswered, err)
		case err != nil && t.failed() && left.CompareAndSwap(false, true):
			done <- failedEarly{err}
			return
		}
		if err != nil {
			rollback(ctx, conn)
		}
		t.release(ctx, pooled) // before the caller continues, and may acquire it again
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
	claimGrace  = 2 * time.Second // beyond LockTimeout, for the network
	commitGrace = 5 * time.Second // beyond the server's own limit for the statements before COMMIT
	rollbackMax = 5 * time.Second
)

// end rolls back what was not committed.
func (t *transaction) end(ctx context.Context) {
	if t.pooled == nil {
		return
	}
	rollback(ctx, t.pooled.Conn())
	t.release(ctx, t.pooled)
	t.pooled = nil
}

func (t *transaction) release(ctx context.Context, pooled *pgxpool.Conn) {
	if t.lasting {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackMax)
		defer cancel()
		_ = pooled.Conn().Close(ctx)
	}
	pooled.Release()
}

// rollback rolls back. If the connection does not answer, the pool closes it and the server rolls back.
func rollback(ctx context.Context, conn *pgx.Conn) {
	if conn.IsClosed() || conn.PgConn().TxStatus() == 'I' {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackMax)
	defer cancel()
	_, _ = conn.Exec(ctx, "ROLLBACK")
}

// statement is one with its arguments.
type statement struct {
	sql  string
	args []any
}

// durably executes statements in a transaction of its own that is durable when durably returns, whatever
// the role's synchronous_commit is. It returns the number of rows that the first one changed.
func (o *Operation) durably(ctx context.Context, statements ...statement) (rows int64, err error) {
	t, err := o.begin(ctx, o.cfg.LockTimeout, false, func(*pgx.Batch) {})
	if err != nil {
		return 0, err
	}
	defer t.end(ctx)
	err = t.commit(ctx, func(batch *pgx.Batch) {
		for i, s := range statements {
			batch.Queue(s.sql, s.args...).Exec(func(tag pgconn.CommandTag) error {
				if i == 0 {
					rows = tag.RowsAffected()
				}
				return nil
			})
		}
	})
	if err != nil {
		return 0, err // they may still take effect
	}
	return rows, nil
}

func millis(d time.Duration) string { return strconv.FormatInt(max(1, d.Milliseconds()), 10) }
