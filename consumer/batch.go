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
	"github.com/effectonce/effectonce/outbox"
)

// engine runs batches. It knows no Kafka client.
type engine struct {
	pool    *pgxpool.Pool
	cfg     Config
	claims  *dedup.Claims
	outbox  *outbox.Outbox // for dead letters
	handler Handler
	sql     queries
	timeout [3]string // settings, in milliseconds
	// unclaimed handles every message without a claim: see internal/nodedup.
	unclaimed bool
}

func newEngine(pool *pgxpool.Pool, handler Handler, cfg Config) (*engine, error) {
	claims, err := dedup.New(dedup.Config{Schema: cfg.Schema})
	if err != nil {
		return nil, err
	}
	letters, err := outbox.New(outbox.Config{Schema: cfg.Schema})
	if err != nil {
		return nil, err
	}
	milliseconds := func(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }
	return &engine{
		pool: pool, cfg: cfg, claims: claims, outbox: letters, handler: handler, sql: newQueries(cfg.Schema),
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
	// stuck is how many holders in a row ended without order and without finishing anything.
	stuck int
}

// work is what one transaction is to do: messages of one partition, in order, from Kafka or, all of them,
// from parked_messages.
type work struct {
	consumer dedup.Consumer
	pos      *position
	msgs     []*Message
	held     *heldKeys
	apart    bool // the position is advanced by somebody else
}

func (w *work) released() bool { return w.msgs[0].row != 0 }

// outcome counts what a transaction committed.
type outcome struct{ fresh, duplicates, parked int }

// transact does the work of a transaction, up to and including its COMMIT. It returns how much of it was
// fresh. After an error nothing is committed, except when the connection was lost during COMMIT: see apply.
func (e *engine) transact(ctx context.Context, w *work, r *run) (outcome, error) {
	t := r.tx
	defer t.end(ctx)
	for _, msg := range w.msgs {
		msg.published = 0
	}
	claimed, err := e.begin(ctx, t, w)
	if err != nil {
		return outcome{}, err
	}
	crashpoint.At(ctx, crashpoint.ConsumerClaimed)
	s := e.sortOut(w, claimed)
	if len(s.handle) > 0 {
		r.places.Store(&s.index)
		err := e.handler.handle(ctx, t, s.handle)
		t.since.Store(0)
		if err != nil {
			return outcome{}, s.blame(ctx, r, err)
		}
	}
	crashpoint.At(ctx, crashpoint.ConsumerHandled)
	if err := ctx.Err(); err != nil {
		return outcome{}, err
	}
	close(r.committing)
	if err := e.commit(ctx, t, w, s); err != nil {
		return outcome{}, err
	}
	w.held.add(s.keys)
	return outcome{fresh: len(s.handle), parked: len(s.parked), duplicates: len(w.msgs) - len(s.handle) - len(s.parked)}, nil
}

// blame finds the place of the failed message in the batch.
func (s *sorting) blame(ctx context.Context, r *run, err error) error {
	if errors.Is(context.Cause(ctx), errHandlerTimeout) {
		return r.culprit(fmt.Errorf("%w: %w", errHandlerTimeout, err))
	}
	var failed *messageError
	if errors.As(err, &failed) {
		return &messageError{s.index[failed.index], failed.err}
	}
	return err
}

// claimed is what the database said about the messages of a transaction.
type claimed struct {
	fresh     []bool
	conflicts []bool    // another message has its ID; nil: not compared
	oldest    time.Time // up to when claims reach back; zero: for ever
}

// begin starts the transaction and claims, in one round trip.
func (e *engine) begin(ctx context.Context, t *tx, w *work) (c claimed, err error) {
	batch := &pgx.Batch{}
	batch.Queue("BEGIN ISOLATION LEVEL " + string(e.cfg.Isolation))
	batch.Queue(e.sql.guard)
	batch.Queue(e.sql.settings, e.timeout[0], e.timeout[1], e.timeout[2])
	decide := e.queueClaim(batch, w)
	if e.expires() && !w.released() {
		batch.Queue(e.sql.age, w.consumer.ID()).QueryRow(func(row pgx.Row) error { return row.Scan(&c.oldest) })
	}
	if err := t.conn.SendBatch(ctx, batch).Close(); err != nil {
		return c, dedup.WrapClaimError(err)
	}
	c.fresh, c.conflicts = decide()
	return c, nil
}

// queueClaim adds what decides which messages are fresh.
func (e *engine) queueClaim(batch *pgx.Batch, w *work) (decide func() (fresh, conflicts []bool)) {
	if w.released() {
		return e.queueLock(batch, w)
	}
	if e.unclaimed {
		return func() ([]bool, []bool) { return all(len(w.msgs)), nil }
	}
	switch e.cfg.Dedup {
	case DedupByPosition:
		return func() ([]bool, []bool) { return w.ahead(), nil }
	case DedupByIDAndPayload:
		prints := make([][16]byte, len(w.msgs))
		for i, msg := range w.msgs {
			prints[i] = dedup.Fingerprint(msg.Key, msg.Value)
		}
		claim := e.claims.QueueChecked(batch, w.consumer, w.ids(), prints)
		return func() ([]bool, []bool) { return claim.Fresh(), claim.Conflicts() }
	default:
		claim := e.claims.Queue(batch, w.consumer, w.ids())
		return func() ([]bool, []bool) { return claim.Fresh(), nil }
	}
}

// expires tells whether claims are forgotten one day, and with them what proves a message fresh.
func (e *engine) expires() bool {
	return !e.cfg.Forever && !e.unclaimed && (e.cfg.Dedup == DedupByID || e.cfg.Dedup == DedupByIDAndPayload)
}

func (w *work) ids() []uuid.UUID {
	ids := make([]uuid.UUID, len(w.msgs))
	for i, msg := range w.msgs {
		ids[i] = msg.ID
	}
	return ids
}

// ahead tells which messages are not behind the stored position.
func (w *work) ahead() []bool {
	fresh := make([]bool, len(w.msgs))
	for i, msg := range w.msgs {
		fresh[i] = w.pos.stored == nil || msg.Offset >= *w.pos.stored
	}
	return fresh
}

func all(n int) []bool {
	fresh := make([]bool, n)
	for i := range fresh {
		fresh[i] = true
	}
	return fresh
}

// commit inserts what was published and parked, advances the position and commits, in one round trip. If
// one of the statements fails the server skips the COMMIT behind it.
//
// Like pgx's Tx.Commit, and unlike a bare COMMIT, it takes the tag ROLLBACK, with which the server answers
// the COMMIT of a failed transaction, for the failure that it is. And it is never cut short: pgx would send
// a cancel request, which makes a COMMIT that waits for a synchronous standby visible without being
// replicated.
func (e *engine) commit(ctx context.Context, t *tx, w *work, s *sorting) error {
	batch := &pgx.Batch{}
	detached := context.WithoutCancel(ctx)
	for _, c := range t.collected {
		if err := c.outbox.Queue(detached, batch, c.msgs...); err != nil {
			return err
		}
	}
	e.queueFailures(detached, batch, w, s)
	batch.Queue(closeGuardSQL)
	var stored int64
	last := w.msgs[len(w.msgs)-1]
	switch {
	case w.released():
		batch.Queue(e.sql.check, e.cfg.Group, w.pos.topic, w.pos.partition, w.pos.epoch)
	case !w.apart:
		batch.Queue(e.sql.advance, e.cfg.Group, w.pos.topic, w.pos.partition, w.pos.epoch, w.pos.stored, last.Offset+1, last.Time).
			QueryRow(func(row pgx.Row) error { return row.Scan(&stored) })
	}
	var tag string
	batch.Queue("COMMIT").Query(func(rows pgx.Rows) error {
		rows.Close()
		tag = rows.CommandTag().String()
		return rows.Err()
	})
	crashpoint.At(ctx, crashpoint.ConsumerCommitting)
	err := t.conn.SendBatch(detached, batch).Close()
	if err == nil && tag != "COMMIT" {
		err = pgx.ErrTxCommitRollback
	}
	if endedByHandler(err) {
		err = Permanent(errors.Join(errEnded, err))
	}
	if err != nil {
		return fmt.Errorf("commit up to offset %d: %w", last.Offset, wrapPosition(err))
	}
	t.over.Store(true)
	if !w.released() && !w.apart {
		w.pos.stored = &stored
	}
	crashpoint.At(ctx, crashpoint.ConsumerCommitted)
	return nil
}

// queueFailures adds what becomes of messages that were not handled, or not at the first attempt.
func (e *engine) queueFailures(ctx context.Context, batch *pgx.Batch, w *work, s *sorting) {
	if len(s.parked) > 0 {
		if e.cfg.OnFailure == OnFailureDeadLetter {
			s = e.queueDeadLetters(ctx, batch, s)
		}
		if len(s.parked) > 0 {
			e.queuePark(batch, w.consumer, s)
		}
	}
	var tried [][16]byte
	for _, msg := range w.msgs {
		if msg.attempts > 0 {
			tried = append(tried, msg.ID)
		}
	}
	if len(tried) > 0 {
		batch.Queue(e.sql.forgetAttempts, w.consumer.ID(), tried)
	}
	if w.released() {
		e.queueReleased(batch, w, s)
	}
}

// end rolls back what was not committed. If that cannot be said to the server soon, closing the
// connection says it.
func (t *tx) end(ctx context.Context) {
	t.over.Store(true)
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
