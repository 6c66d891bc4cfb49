package consumer

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/nodedup"
)

// engine runs batches. It knows no Kafka client.
type engine struct {
	pool    *pgxpool.Pool
	cfg     Config
	claims  *dedup.Claims
	handler Handler
	sql     queries
	timeout [3]string // settings, in milliseconds
}

func newEngine(pool *pgxpool.Pool, handler Handler, cfg Config) (*engine, error) {
	claims, err := dedup.New(dedup.Config{Schema: cfg.Schema})
	if err != nil {
		return nil, err
	}
	milliseconds := func(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }
	return &engine{
		pool: pool, cfg: cfg, claims: claims, handler: handler, sql: newQueries(cfg.Schema),
		timeout: [3]string{milliseconds(cfg.StatementTimeout), milliseconds(cfg.LockTimeout), milliseconds(cfg.IdleTimeout)},
	}, nil
}

// position is a partition as its present holder knows it.
type position struct {
	topic     string
	partition int32
	epoch     int64
	// stored is next_offset as this holder saw it last; nil: none.
	stored *int64
}

// errGoexit stands for a handler that ended its goroutine, as t.FailNow does.
var errGoexit = errors.New("handler ended its goroutine (runtime.Goexit)")

// apply handles messages of one partition in one transaction and advances its position behind the last
// of them. It returns how many were fresh. After an error nothing of them is committed, except when the
// connection was lost during COMMIT: then nobody knows, and running them again finds out, since the
// claims are there or not.
//
// It runs in a goroutine of its own, so that a handler that ends its goroutine ends only the batch. When
// ctx ends it waits for the rollback, but not for ever for a COMMIT that the server does not answer: that
// one is left to itself, and to whoever runs the messages next.
func (e *engine) apply(ctx context.Context, consumer dedup.Consumer, pos *position, msgs []*Message) (int, error) {
	var fresh int
	err := errGoexit
	done, committing := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		fresh, err = e.transact(ctx, consumer, pos, msgs, committing)
	}()
	select {
	case <-done:
		return fresh, err
	case <-ctx.Done():
	}
	select {
	case <-done:
		return fresh, err
	case <-committing:
	}
	answer := time.NewTimer(commitGrace)
	defer answer.Stop()
	select {
	case <-done:
		return fresh, err
	case <-answer.C:
		return 0, errCommitUnanswered
	}
}

// commitGrace is how long a stopping consumer waits for the answer to a COMMIT.
const commitGrace = time.Second

var errCommitUnanswered = errors.New("the database did not answer COMMIT before the consumer had to stop: whether it committed is found out by whoever runs the messages next")

func (e *engine) transact(ctx context.Context, consumer dedup.Consumer, pos *position, msgs []*Message, committing chan<- struct{}) (int, error) {
	for i, msg := range msgs {
		if msg.invalid != nil {
			return 0, &messageError{i, msg.invalid}
		}
		msg.published = 0
	}
	conn, err := e.pool.Acquire(ctx)
	if err != nil {
		return 0, fmt.Errorf("get a database connection: %w", err)
	}
	defer conn.Release()
	t := &tx{conn: conn.Conn()}
	defer t.end(ctx)

	fresh, index, err := e.begin(ctx, t, consumer, msgs)
	if err != nil {
		return 0, err
	}
	crashpoint.Here(crashpoint.ConsumerClaimed)
	if len(fresh) > 0 {
		if err := e.handler.handle(ctx, t, fresh); err != nil {
			var failed *messageError
			if errors.As(err, &failed) {
				return 0, &messageError{index[failed.index], failed.err}
			}
			return 0, err
		}
	}
	crashpoint.Here(crashpoint.ConsumerHandled)
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	close(committing)
	return len(fresh), e.commit(ctx, t, pos, msgs[len(msgs)-1])
}

// begin starts the transaction and claims, in one round trip. It returns the fresh messages and their
// places in msgs.
func (e *engine) begin(ctx context.Context, t *tx, consumer dedup.Consumer, msgs []*Message) ([]*Message, []int, error) {
	ids := make([]uuid.UUID, len(msgs))
	for i, msg := range msgs {
		ids[i] = msg.ID
	}
	batch := &pgx.Batch{}
	batch.Queue("BEGIN ISOLATION LEVEL " + string(e.cfg.Isolation))
	batch.Queue(e.sql.settings, e.timeout[0], e.timeout[1], e.timeout[2])
	var claim *dedup.Result
	if e.cfg.Dedup != nodedup.Level {
		claim = e.claims.Queue(batch, consumer, ids)
	}
	if err := t.conn.SendBatch(ctx, batch).Close(); err != nil {
		return nil, nil, dedup.WrapClaimError(err)
	}
	fresh, index := make([]*Message, 0, len(msgs)), make([]int, 0, len(msgs))
	var isFresh []bool
	if claim != nil {
		isFresh = claim.Fresh()
	}
	for i, msg := range msgs {
		if claim == nil || isFresh[i] {
			fresh, index = append(fresh, msg), append(index, i)
		}
	}
	return fresh, index, nil
}

// commit inserts what was published, advances the position and commits, in one round trip. If one of
// the statements fails the server skips the COMMIT behind it.
//
// Like pgx's Tx.Commit, and unlike a bare COMMIT, it takes the tag ROLLBACK, with which the server answers
// the COMMIT of a failed transaction, for the failure that it is. And it is never cut short: pgx would send
// a cancel request, which makes a COMMIT that waits for a synchronous standby visible without being
// replicated.
func (e *engine) commit(ctx context.Context, t *tx, pos *position, last *Message) error {
	batch := &pgx.Batch{}
	detached := context.WithoutCancel(ctx)
	for _, c := range t.collected {
		if err := c.outbox.Queue(detached, batch, c.msgs...); err != nil {
			return err
		}
	}
	var stored int64
	batch.Queue(e.sql.advance, e.cfg.Group, pos.topic, pos.partition, pos.epoch, pos.stored, last.Offset+1, last.Time).
		QueryRow(func(row pgx.Row) error { return row.Scan(&stored) })
	var tag string
	batch.Queue("COMMIT").Query(func(rows pgx.Rows) error {
		rows.Close()
		tag = rows.CommandTag().String()
		return rows.Err()
	})
	crashpoint.Here(crashpoint.ConsumerCommitting)
	if err := t.conn.SendBatch(detached, batch).Close(); err != nil {
		return fmt.Errorf("commit up to offset %d: %w", last.Offset, wrapPosition(err))
	}
	if tag != "COMMIT" {
		return fmt.Errorf("commit up to offset %d: %w", last.Offset, pgx.ErrTxCommitRollback)
	}
	t.closed = true
	pos.stored = &stored
	crashpoint.Here(crashpoint.ConsumerCommitted)
	return nil
}

// end rolls back what was not committed. If that cannot be said to the server soon, closing the
// connection says it.
func (t *tx) end(ctx context.Context) {
	t.closed = true
	if t.conn.IsClosed() || t.conn.PgConn().TxStatus() == 'I' {
		return
	}
	limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if t.conn.PgConn().IsBusy() {
		_ = t.conn.Close(limit)
		return
	}
	if _, err := t.conn.Exec(limit, "ROLLBACK"); err != nil {
		_ = t.conn.Close(limit)
	}
}
