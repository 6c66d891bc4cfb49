package consumer

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// attempt is one execution of a transaction, in its own goroutine. A handler that ends its
// goroutine ends only that one. A handler that never returns is abandoned together with its
// connection.
type attempt struct {
	pooled     *pgxpool.Conn
	slots      chan struct{}
	owned      atomic.Bool // the pool has the connection again, or no longer
	tx         *tx
	committing chan struct{} // closed when only the last round trip with COMMIT remains
	done       chan struct{}
	outcome    outcome
	failure    *failure
	broken     bool // the engine panicked: the state of the connection is unknown
}

// giveBack ends the attempt's use of its connection. One that a goroutine of the handler still uses, or
// whose settings outlast the transaction, is cut and abandoned. One that was abandoned is closed: the
// pool no longer owns it.
func (a *attempt) giveBack() {
	switch {
	case a.broken || a.tx.busy.Load() || a.tx.lasting:
		a.cut()
		a.abandon()
	case a.owned.CompareAndSwap(false, true):
		a.pooled.Release()
		<-a.slots
	default:
		ctx, cancel := context.WithTimeout(context.Background(), cutGrace) //nolint:forbidigo // the attempt is over
		defer cancel()
		_ = a.tx.conn.Close(ctx)
	}
}

// abandon removes the connection from the pool while the attempt still uses it. It does not touch
// the connection itself, which is not safe for concurrent use.
func (a *attempt) abandon() bool {
	if !a.owned.CompareAndSwap(false, true) {
		return false
	}
	a.pooled.Hijack()
	<-a.slots
	return true
}

// cut closes the network connection: the server rolls back, and every wait for an answer ends.
func (a *attempt) cut() { _ = a.tx.conn.PgConn().Conn().Close() }

const (
	// acquireMax bounds the wait for a connection of the pool.
	acquireMax = 15 * time.Second
	// answerGrace is added to StatementTimeout. After that the server does not answer, or its
	// answer does not arrive.
	answerGrace = 5 * time.Second
	// commitGrace is how long a stopping consumer waits for the answer to a COMMIT.
	commitGrace = time.Second
	// cutGrace is how long a handler whose context was cancelled may take to return, and again
	// after its connection was cut.
	cutGrace = 2 * time.Second
)

// answerMax bounds a round trip of the engine. The server bounds each statement, but its answer may
// be lost on a silent connection.
func (c *Consumer) answerMax() time.Duration { return c.cfg.StatementTimeout + answerGrace }

var (
	// errGoexit reports a handler that ended its goroutine, as t.FailNow does.
	errGoexit         = errors.New("handler ended its goroutine (runtime.Goexit)")
	errHandlerTimeout = errors.New("handler took longer than HandlerTimeout")
	errContextIgnored = errors.New("handler ignored the end of its context: its connection was cut and its goroutine abandoned; pass ctx to everything that waits")
	errNoCommitAnswer = errors.New("the database did not answer COMMIT in time: the outcome is unknown, the next attempt resolves it")
	errManyAbandoned  = errors.New("too many handlers ignored the end of their context and still run: fix the handler, or restart the process")
)

// errPool: the connections of the pool are in use, which is no trouble of the database.
var errPool = errors.New("no connection of the pool is free")

// acquire takes a connection from the pool, within acquireMax. Transactions use all connections but
// one, which is left to handlers that ask the same pool, and to the consumer's other statements.
func (c *Consumer) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	limited, cancel := context.WithTimeout(ctx, acquireMax)
	defer cancel()
	select {
	case c.slots <- struct{}{}:
	case <-limited.Done():
		return nil, fmt.Errorf("%w: this consumer's transactions use %d", errPool, cap(c.slots))
	}
	conn, err := c.pool.Acquire(limited)
	if err != nil {
		<-c.slots
		stat := c.pool.Stat()
		if stat.AcquiredConns() == stat.MaxConns() {
			err = errors.Join(errPool, err)
		}
		return nil, fmt.Errorf("get a database connection (%d of %d are in use): %w", stat.AcquiredConns(), stat.MaxConns(), err)
	}
	return conn, nil
}

// apply does work in one transaction. After a failure nothing is committed, unless the connection
// was lost during COMMIT. Then the outcome is unknown, and the next attempt resolves it: the claims
// exist or they do not.
//
// When ctx ends, apply waits for the rollback. The wait is bounded for a COMMIT without an answer
// and for a handler that does not return. These are abandoned with their connection.
func (c *Consumer) apply(ctx context.Context, w *work) (outcome, *failure) {
	if int(c.abandoned.Load()) >= c.cfg.AbandonedMax {
		return outcome{}, engineFailure(errManyAbandoned)
	}
	conn, err := c.acquire(ctx)
	if err != nil {
		return outcome{}, engineFailure(err)
	}
	limited, cancel := context.WithCancelCause(ctx)
	a := &attempt{pooled: conn, slots: c.slots, committing: make(chan struct{}), done: make(chan struct{})}
	a.tx = &tx{conn: conn.Conn(), late: c.usedLate, begun: time.Now(), published: map[*Message]int{}, idleMax: c.cfg.IdleTimeout}
	a.failure = &failure{origin: originHandler, err: errGoexit} // unless transact returns
	go func() {
		defer close(a.done)
		defer a.giveBack() //nolint:contextcheck // it may outlive ctx
		defer func() {
			if a.failure != nil && a.failure.err == errGoexit { //nolint:errorlint // the value set above
				a.failure = a.ended(errGoexit)
			}
		}()
		err := guard(func() error {
			a.outcome, a.failure = c.transact(limited, w, a)
			return nil
		})
		if err != nil { // misuse of the connection by a handler may surface anywhere
			a.broken, a.failure = true, a.ended(err)
		}
	}()
	defer cancel(nil)
	return c.watch(ctx, cancel, a)
}

// ended is the failure of an attempt whose goroutine ended without an outcome. Once COMMIT may have
// been sent, the outcome is unknown.
func (a *attempt) ended(err error) *failure {
	select {
	case <-a.committing:
		return &failure{origin: originCommit, lost: true, err: err}
	default:
		return a.blameCurrent(err)
	}
}

// blameCurrent attributes an error to the message that is being handled.
func (a *attempt) blameCurrent(err error) *failure {
	return &failure{origin: originHandler, msg: a.tx.current.Load(), err: err}
}

// watch waits for an attempt to end. After HandlerTimeout, or when ctx ends, the handler may return for
// cutGrace; then its connection is cut, and after the same time again it is abandoned.
//
// A COMMIT without an answer is different: its connection is removed from the pool and not cut. pgx
// would send a cancel request for it, which makes a COMMIT that waits for a synchronous standby
// visible without being replicated. Its claims keep a second attempt waiting until the server has
// decided the outcome. It does not count against AbandonedMax: no handler runs, and a network that
// drops every COMMIT must not stop later attempts.
func (c *Consumer) watch(ctx context.Context, cancel context.CancelCauseFunc, a *attempt) (outcome, *failure) {
	limit := time.NewTimer(c.cfg.HandlerTimeout)
	defer limit.Stop()
	stop, committing, ends, cut := ctx.Done(), a.committing, false, false
	for {
		select {
		case <-a.done:
			return a.outcome, a.failure
		case <-committing:
			committing = nil
			limit.Reset(2 * c.answerMax()) // the inserts before COMMIT, and COMMIT
			if stop == nil {
				limit.Reset(commitGrace)
			}
			continue
		case <-stop:
			stop = nil
			switch {
			case committing == nil:
				limit.Reset(commitGrace)
			case !ends:
				ends = true
				limit.Reset(cutGrace)
			}
			continue
		case <-limit.C:
		}
		switch left := a.tx.left(c.cfg.HandlerTimeout); {
		case committing == nil:
			a.tx.over.Store(true)
			a.abandon()
			return outcome{}, &failure{origin: originCommit, lost: true, err: errNoCommitAnswer}
		case !ends && left > 0:
			limit.Reset(left)
		case !ends:
			ends = true
			cancel(errHandlerTimeout)
			limit.Reset(cutGrace)
		case !cut:
			cut = true
			a.tx.over.Store(true)
			a.cut()
			limit.Reset(cutGrace)
		default:
			c.leaveBehind(a)
			return outcome{}, a.blameCurrent(errContextIgnored)
		}
	}
}

// leaveBehind abandons a handler that does not return, and counts it until it does. The pool replaces
// its connection.
func (c *Consumer) leaveBehind(a *attempt) {
	a.tx.leave()
	if a.abandon() { // otherwise it has ended
		count(&c.abandoned, a.done)
	}
}

// count counts user code that was left behind, until it returns.
func count(running *atomic.Int32, done <-chan struct{}) {
	running.Add(1)
	go func() {
		<-done
		running.Add(-1)
	}()
}

// left returns the remaining part of limit for the message being handled.
func (t *tx) left(limit time.Duration) time.Duration {
	since := t.since.Load()
	if since == 0 {
		return limit // the engine runs, under its own limits
	}
	return limit - (time.Since(t.begun) - time.Duration(since))
}

// usedLate logs a handler that kept its transaction.
func (c *Consumer) usedLate(msg *Message) {
	attrs := []any{"group", c.cfg.Group}
	if msg != nil {
		attrs = append(attrs, "topic", msg.Topic, "partition", msg.Partition, "offset", msg.Offset, "id", msg.ID)
	}
	c.cfg.Logger.Error("handler used its transaction after it returned; the statement was refused: do not keep the transaction, and wait for goroutines that use it", attrs...)
}
