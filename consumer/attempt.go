package consumer

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// attempt is one execution of a transaction, in a goroutine of its own: a handler that ends its goroutine ends
// only that, and one that never returns is left behind together with its connection.
type attempt struct {
	conn       *borrowed
	tx         *tx
	committing chan struct{} // closed when nothing but the COMMIT is left
	done       chan struct{}
	places     atomic.Pointer[[]int] // in the batch, of the messages that the handler has
	outcome    outcome
	failure    *failure
	broken     bool // the engine panicked: the connection is in no known state
}

// giveBack ends the attempt's use of its connection. One that a goroutine of the handler still uses, which is not safe
// for concurrent use, is cut and left to it.
func (a *attempt) giveBack() {
	if !a.broken && !a.tx.busy.Load() {
		a.conn.release()
		return
	}
	a.conn.cut()
	a.conn.abandon()
}

// borrowed is a connection of the pool while an attempt has it. It has one owner: whichever of release and
// abandon comes first.
type borrowed struct {
	pooled *pgxpool.Conn
	conn   *pgx.Conn
	owned  atomic.Bool
}

// release ends the attempt's use of the connection. A connection that was abandoned is closed, for the pool has
// replaced it.
func (b *borrowed) release() {
	if b.owned.CompareAndSwap(false, true) {
		b.pooled.Release()
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), cutGrace) //nolint:forbidigo // the attempt that borrowed it is over
	defer cancel()
	_ = b.conn.Close(ctx)
}

// abandon takes the connection out of the pool, while the attempt still has it. It does not touch the connection
// itself, which is not safe for concurrent use.
func (b *borrowed) abandon() bool {
	if !b.owned.CompareAndSwap(false, true) {
		return false
	}
	b.pooled.Hijack()
	return true
}

// cut closes the network connection: the server rolls back, and whatever waits for an answer ends.
func (b *borrowed) cut() { _ = b.conn.PgConn().Conn().Close() }

const (
	// acquireMax bounds the wait for a connection of the pool.
	acquireMax = 15 * time.Second
	// answerGrace is added to StatementTimeout: then the server does not answer, or the answer does not arrive.
	answerGrace = 5 * time.Second
	// commitGrace is how long a stopping consumer waits for the answer to a COMMIT.
	commitGrace = time.Second
	// cutGrace is how long a handler whose context was cancelled may take to return, and again after its
	// connection was cut.
	cutGrace = 2 * time.Second
)

// answerMax bounds a round trip of the engine. The server bounds each statement, but its answer may be lost on a
// connection that went silent.
func (e *engine) answerMax() time.Duration { return e.cfg.StatementTimeout + answerGrace }

var (
	// errGoexit stands for a handler that ended its goroutine, as t.FailNow does.
	errGoexit         = errors.New("handler ended its goroutine (runtime.Goexit)")
	errHookGoexit     = errors.New("it ended its goroutine (runtime.Goexit)")
	errHandlerTimeout = errors.New("handler took longer than HandlerTimeout")
	errSilent         = errors.New("a statement of the handler got no answer, and the server is not at work on it: the connection is silent")
	errContextIgnored = errors.New("handler ignored the end of its context: its connection was cut and its goroutine left behind; pass ctx to everything that waits")
	errNoCommitAnswer = errors.New("the database did not answer COMMIT in time: the outcome is unknown, the next attempt resolves it")
	errManyAbandoned  = errors.New("too many handlers ignored the end of their context and still run: fix the handler, or restart the process")
)

// acquire takes a connection of the pool, in bounded time.
func (e *engine) acquire(ctx context.Context) (*borrowed, error) {
	limited, cancel := context.WithTimeout(ctx, acquireMax)
	defer cancel()
	conn, err := e.pool.Acquire(limited)
	if err != nil {
		stat := e.pool.Stat()
		return nil, fmt.Errorf("get a database connection (%d of %d are in use): %w", stat.AcquiredConns(), stat.MaxConns(), err)
	}
	return &borrowed{pooled: conn, conn: conn.Conn()}, nil
}

// apply does work in one transaction. After a failure nothing of it is committed, except where the connection was
// lost during COMMIT: then the outcome is unknown, and the next attempt resolves it, since the claims are there or
// not.
//
// When ctx ends it waits for the rollback, but in bounded time for a COMMIT without an answer and for a handler that
// does not return. These are left behind with their connection.
func (e *engine) apply(ctx context.Context, w *work) (outcome, *failure) {
	if int(e.abandoned.Load()) >= e.cfg.AbandonedMax {
		return outcome{}, &failure{origin: originEngine, index: unknownIndex, err: errManyAbandoned}
	}
	conn, err := e.acquire(ctx)
	if err != nil {
		return outcome{}, &failure{origin: originEngine, index: unknownIndex, err: err}
	}
	limited, cancel := context.WithCancelCause(ctx)
	a := &attempt{
		conn:       conn,
		tx:         &tx{conn: conn.conn, late: e.usedLate, begun: time.Now(), idleMax: e.cfg.IdleTimeout},
		committing: make(chan struct{}), done: make(chan struct{}),
	}
	a.failure = &failure{origin: originHandler, index: unknownIndex, err: errGoexit} // unless transact returns
	go func() {
		defer close(a.done)
		defer a.giveBack() //nolint:contextcheck // it may outlive ctx
		defer func() {
			if a.failure != nil && a.failure.err == errGoexit { //nolint:errorlint // the value set above
				a.failure = a.ended(errGoexit)
			}
		}()
		err := guard(func() error {
			a.outcome, a.failure = e.transact(limited, w, a)
			return nil
		})
		if err != nil { // what handlers do to a connection behind the engine's back may surface anywhere
			a.broken, a.failure = true, a.ended(err)
		}
	}()
	defer cancel(nil)
	return e.watch(ctx, cancel, a)
}

// ended is what it means that the goroutine of an attempt ended before it had its outcome. Once COMMIT may have been
// sent, the outcome is unknown.
func (a *attempt) ended(err error) *failure {
	select {
	case <-a.committing:
		return &failure{origin: originCommit, index: unknownIndex, lost: true, err: err}
	default:
		return a.blameCurrent(err)
	}
}

// blameCurrent makes an error the failure of the message that is being handled.
func (a *attempt) blameCurrent(err error) *failure {
	f := &failure{origin: originHandler, index: unknownIndex, err: err}
	places, at := a.places.Load(), int(a.tx.index.Load())
	if at < 0 || places == nil {
		return f
	}
	if at += int(a.tx.base.Load()); at < len(*places) {
		f.index = (*places)[at]
	}
	return f
}

// watch waits for an attempt to end.
func (e *engine) watch(ctx context.Context, cancel context.CancelCauseFunc, a *attempt) (outcome, *failure) {
	limit := time.NewTimer(e.cfg.HandlerTimeout)
	defer limit.Stop()
	for {
		select {
		case <-a.done:
			return a.outcome, a.failure
		case <-a.committing:
			return e.awaitCommit(ctx, a)
		case <-ctx.Done():
			return e.end(ctx, a)
		case <-limit.C:
			if left := a.tx.left(e.cfg.HandlerTimeout); left > 0 {
				limit.Reset(left)
				continue
			}
			why := errHandlerTimeout
			if e.silent(ctx, a.tx) {
				why = errSilent
			}
			cancel(why)
			return e.end(ctx, a)
		}
	}
}

// awaitCommit waits for the answer to COMMIT. A connection whose answer does not come is left behind and not cut:
// pgx would send a cancel request for it, which makes a COMMIT that waits for a synchronous standby visible without
// being replicated. Its claims keep a second attempt waiting until the server knows the outcome. It does not count as
// abandoned: no handler runs, and a network that swallows every COMMIT must not stop what comes after it.
func (e *engine) awaitCommit(ctx context.Context, a *attempt) (outcome, *failure) {
	answer := time.NewTimer(2 * e.answerMax()) // what is inserted before COMMIT, and COMMIT
	defer answer.Stop()
	stop := ctx.Done()
	for {
		select {
		case <-a.done:
			return a.outcome, a.failure
		case <-stop:
			stop = nil
			answer.Reset(commitGrace)
		case <-answer.C:
			a.tx.over.Store(true)
			a.conn.abandon()
			return outcome{}, &failure{origin: originCommit, index: unknownIndex, lost: true, err: errNoCommitAnswer}
		}
	}
}

// leaveBehind gives up a handler that does not return. The pool makes another connection in its place.
func (e *engine) leaveBehind(a *attempt) {
	a.tx.over.Store(true)
	if a.conn.abandon() { // else it has ended after all
		e.countAbandoned(a.done)
	}
}

// countAbandoned counts code of the user that was left behind, until it returns.
func (e *engine) countAbandoned(done <-chan struct{}) {
	e.abandoned.Add(1)
	go func() {
		<-done
		e.abandoned.Add(-1)
	}()
}

// left is what remains of the limit for the message being handled.
func (t *tx) left(limit time.Duration) time.Duration {
	since := t.since.Load()
	if since == 0 {
		return limit // the engine is at work, under its own limits
	}
	return limit - (time.Since(t.begun) - time.Duration(since))
}

// end ends an attempt whose context is over.
func (e *engine) end(ctx context.Context, a *attempt) (outcome, *failure) {
	grace := time.NewTimer(cutGrace)
	defer grace.Stop()
	for _, cut := range []bool{true, false} {
		select {
		case <-a.done:
			return a.outcome, a.failure
		case <-a.committing:
			return e.awaitCommit(ctx, a)
		case <-grace.C:
		}
		if cut {
			a.tx.over.Store(true)
			a.conn.cut()
			grace.Reset(cutGrace)
		}
	}
	e.leaveBehind(a)
	return outcome{}, a.blameCurrent(errContextIgnored)
}

// silent reports whether a handler waits for the answer to a statement that the server is not at work on: the request
// or its answer was lost, which is not the message's failure. It asks on a connection of its own, for those of the
// pool may be used up, or silent, too.
func (e *engine) silent(ctx context.Context, t *tx) bool {
	used := t.used.Load()
	if !t.busy.Load() {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, answerGrace)
	defer cancel()
	state, err := e.sessionState(ctx, t.backend.Load())
	if !t.busy.Load() || t.used.Load() != used {
		return false // the answer came meanwhile
	}
	var answered *pgconn.PgError
	if errors.As(err, &answered) {
		return false // the database works, but does not say
	}
	return err != nil || strings.HasPrefix(state, "idle")
}

// sessionState reads what the server says about a session; pgx.ErrNoRows: it has ended.
func (e *engine) sessionState(ctx context.Context, backend int32) (state string, err error) {
	cfg := e.pool.Config()
	if cfg.BeforeConnect != nil {
		if err := cfg.BeforeConnect(ctx, cfg.ConnConfig); err != nil {
			return "", err
		}
	}
	conn, err := pgx.ConnectConfig(ctx, cfg.ConnConfig)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close(ctx) }()
	err = conn.QueryRow(ctx, sessionSQL, backend).Scan(&state)
	return state, err
}

// usedLate reports a handler that kept its transaction.
func (e *engine) usedLate(msg *Message) {
	attrs := []any{"group", e.cfg.Group}
	if msg != nil {
		attrs = append(attrs, "topic", msg.Topic, "partition", msg.Partition, "offset", msg.Offset, "id", msg.ID)
	}
	e.cfg.Logger.Error("handler used its transaction after it returned; the statement was refused: do not keep the transaction, and wait for goroutines that use it", attrs...)
}
