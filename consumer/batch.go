package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/handlertx"
	"github.com/effectonce/effectonce/internal/pgerr"
)

// bounded limits a round trip of the engine outside of a transaction's own limits.
func (c *Consumer) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, c.answerMax())
}

// work is the input of one transaction: messages of one partition, in order, either all from Kafka
// or all from parked_messages.
type work struct {
	consumer dedup.Consumer
	pos      *position
	msgs     []*Message
	held     *heldKeys
	// apart: this transaction does not advance the position. It only checks that the position is
	// still ours.
	apart bool
	hints [][]byte // keys of the messages that may be held
	asks  bool     // it must not take messages as fresh: see begin
	// stored is the position after COMMIT; nil: not advanced. Only the caller that waited for the
	// transaction may use it.
	stored *int64
}

func (w *work) released() bool { return w.msgs[0].row != 0 }

// outcome is what a transaction committed.
type outcome struct {
	fresh, duplicates     int
	conflicts             int  // dropped
	taken                 bool // see claimed
	parked                []Parked
	claim, handle, commit time.Duration
	unheld                [][]byte // keys that are no longer held
}

// transact does the work of a transaction, up to and including its COMMIT. After a failure nothing
// is committed, unless the connection was lost during COMMIT: see apply.
func (c *Consumer) transact(ctx context.Context, w *work, a *attempt) (outcome, *failure) {
	t := a.tx
	defer t.end(ctx)
	if f := c.askIDs(ctx, t, w.msgs); f != nil {
		return outcome{}, f
	}
	begun := time.Now()
	claimed, err := c.begin(ctx, t, w)
	if err == nil {
		err = c.compare(ctx, t, w, &claimed)
	}
	if err != nil {
		return outcome{}, &failure{origin: originEngine, lost: t.conn.IsClosed(), err: err}
	}
	crashpoint.At(ctx, crashpoint.ConsumerClaimed)
	s, out := c.choose(w, claimed), outcome{claim: time.Since(begun)}
	if len(s.handle) > 0 {
		err := c.handler.handle(ctx, t, s.handle)
		t.since.Store(0)
		if t.session && len(s.handle) > 1 {
			// What one handler set would reach the messages behind it.
			return outcome{}, &failure{origin: originHandler, err: errSession}
		}
		if err != nil {
			return outcome{}, handlerFailure(ctx, t, err)
		}
	}
	out.handle = time.Since(begun) - out.claim
	crashpoint.At(ctx, crashpoint.ConsumerHandled)
	if err := ctx.Err(); err != nil {
		return outcome{}, &failure{origin: originHandler, err: context.Cause(ctx)}
	}
	w.held.add(s.keys) // before COMMIT: if it fails, the next message of the key corrects it
	if f := c.commit(ctx, a, w, s); f != nil {
		return outcome{}, f
	}
	out.unheld = slices.DeleteFunc(w.hints, func(key []byte) bool { // parked before, or by this transaction
		_, before := claimed.held[keyHash(key)]
		_, now := s.keys[keyHash(key)]
		return before || now
	})
	out.commit = time.Since(begun) - out.claim - out.handle
	out.taken, out.fresh, out.conflicts, out.parked = claimed.taken, len(s.handle)+len(s.skip), claimed.dropped, s.report()
	out.duplicates = len(w.msgs) - out.fresh - out.conflicts - len(s.parked)
	return out, nil
}

// send runs statements in one round trip, and counts in done the ones that succeeded.
func send(ctx context.Context, conn *pgx.Conn, batch *pgx.Batch, done *int) error {
	results := conn.SendBatch(ctx, batch)
	for _, query := range batch.QueuedQueries {
		var err error
		if query.Fn != nil {
			err = query.Fn(results)
		} else {
			_, err = results.Exec()
		}
		if err != nil {
			_ = results.Close() // returns the same error
			return err
		}
		*done++
	}
	return results.Close()
}

var errSession = errors.New("a handler changed the session (role, setting, temporary table): the next messages are handled in transactions of their own, which is slower; logged once")

var errServerChanged = errors.New("the connection leads to another server, or to one that was restarted, since the position was acquired")

// beginAsking begins a transaction and claims message by message, which finds the duplicates.
func (c *Consumer) beginAsking(ctx context.Context, t *tx, w *work, got *claimed) error {
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	batch := &pgx.Batch{}
	batch.Queue(c.beginSQL())
	batch.Queue(c.sql[handlertx.GuardSQL])
	batch.Queue(c.sql[settingsSQL], c.timeout[0], c.timeout[1], c.timeout[2]).QueryRow(func(row pgx.Row) error { return row.Scan(nil, nil, nil, nil, &t.server, &t.role) })
	decide := c.queueClaim(batch, w, got)
	if c.expires() && !w.released() {
		c.claims.QueueForgotten(batch, w.consumer, &got.forgotten, c.cfg.Isolation != pgx.ReadCommitted)
	}
	unlocked := c.queueHeld(batch, w, got)
	done := 0
	if err := send(ctx, t.conn, batch, &done); err != nil {
		return dedup.WrapClaimError(err)
	}
	if unlocked() {
		return fmt.Errorf("%w: the first parked message of a key was deleted concurrently", dedup.ErrRetry)
	}
	decide()
	return nil
}

// queueHeld reads which of the messages' keys, among those that this holder knows, are held, and locks the first parked
// message of each: a message that the transaction parks behind it would wait for ever if an operator deleted it.
func (c *Consumer) queueHeld(batch *pgx.Batch, w *work, got *claimed) (unlocked func() bool) {
	w.hints = nil
	if !w.released() && c.holdsKeys() {
		w.hints = w.held.of(w.msgs)
	}
	if len(w.hints) == 0 {
		return func() bool { return false }
	}
	got.held = map[keyHash]struct{}{}
	locked := map[keyHash]struct{}{}
	args := []any{w.consumer.ID(), w.pos.topic, w.pos.partition, w.hints}
	batch.Queue("SET LOCAL enable_seqscan = off") // the plans may be older than what is parked
	batch.Queue(c.sql[touchHeadsSQL], args...).Query(readHashes(locked))
	batch.Queue(c.sql[heldNowSQL], args...).Query(readHashes(got.held))
	batch.Queue("SET LOCAL enable_seqscan TO DEFAULT")
	return func() bool {
		for hash := range got.held {
			if _, there := locked[hash]; !there {
				return true
			}
		}
		return false
	}
}

// queueClaim adds the statements that decide which messages are fresh.
func (c *Consumer) queueClaim(batch *pgx.Batch, w *work, got *claimed) (decide func()) {
	switch {
	case w.released():
		return c.queueLock(batch, w, got)
	case c.unclaimed:
		return func() { got.fresh = slices.Repeat([]bool{true}, len(w.msgs)) }
	case c.cfg.Dedup == DedupByPosition:
		return func() { got.fresh = w.ahead() }
	}
	got.result = c.claims.Queue(batch, w.consumer, claims(w.msgs))
	return func() { got.fresh = got.result.Fresh() }
}

// claims lists messages as package dedup claims them.
func claims(msgs []*Message) []dedup.Message {
	list := make([]dedup.Message, len(msgs))
	for i, msg := range msgs {
		list[i] = dedup.Message{ID: msg.ID, Fingerprint: dedup.Fingerprint(msg.Key, msg.Value)}
	}
	return list
}

// ahead reports which messages are at or after the stored position.
func (w *work) ahead() []bool {
	fresh := make([]bool, len(w.msgs))
	for i, msg := range w.msgs {
		fresh[i] = msg.Offset >= w.pos.next.Load()
	}
	return fresh
}

// commit inserts published and parked messages, advances the position and commits, in one round
// trip. If one of the statements fails, the server skips the COMMIT after it.
//
// The server answers the COMMIT of a failed transaction with the tag ROLLBACK. Like pgx's
// Tx.Commit, and unlike a bare COMMIT, this method treats that as a failure. It is never cancelled:
// pgx would send a cancel request, which makes a COMMIT that waits for a synchronous standby
// visible without being replicated.
func (c *Consumer) commit(ctx context.Context, a *attempt, w *work, s *selection) *failure {
	t, batch := a.tx, &pgx.Batch{}
	detached := context.WithoutCancel(ctx)
	t.turn(nil) // the outbox calls user code, which is under the limit of the handler
	for i, got := range t.collected {
		if err := got.outbox.Queue(detached, batch, got.msgs...); err != nil {
			return &failure{origin: originStatement, msg: got.msg, err: err}
		}
		t.collected[i].upTo = batch.Len()
	}
	published := batch.Len()
	letters, refused := c.queueFailures(detached, batch, w, s)
	if refused != nil {
		return refused
	}
	batch.Queue(handlertx.CloseGuardSQL)
	var stored int64
	c.queuePosition(batch, w, &stored)
	var tag string
	batch.Queue("COMMIT").Query(func(rows pgx.Rows) error {
		rows.Close()
		tag = rows.CommandTag().String()
		return rows.Err()
	})
	t.since.Store(0)
	crashpoint.At(ctx, crashpoint.ConsumerCommitting)
	close(a.committing) // from here on the outcome may be unknown
	done, idle := 0, t.idled()
	var err error
	if t.session { // the role that the handler left behind may not write what follows, nor may the driver prepare it
		_, err = t.conn.Exec(detached, "SELECT pg_catalog.set_config('role', $1, true)", t.role)
	}
	if err == nil {
		if err = send(detached, t.conn, batch, &done); err == nil && tag != "COMMIT" {
			err = pgx.ErrTxCommitRollback
		}
	}
	if err != nil {
		f := &failure{origin: originEngine, lost: t.conn.IsClosed(), err: fmt.Errorf("commit up to offset %d: %w", w.msgs[len(w.msgs)-1].Offset, err)}
		c.findOrigin(ctx, t, w, s, f, round{done, published, letters, batch.Len(), idle})
		return f
	}
	t.over.Store(true)
	if !w.released() && !w.apart {
		w.stored = &stored
	}
	crashpoint.At(ctx, crashpoint.ConsumerCommitted)
	return nil
}

// queuePosition adds the statement that advances the position, or checks that it is still ours.
func (c *Consumer) queuePosition(batch *pgx.Batch, w *work, stored *int64) {
	args := []any{c.cfg.Group, w.pos.topic, w.pos.partition, w.pos.epoch}
	switch last := w.msgs[len(w.msgs)-1]; {
	case w.released():
		batch.Queue(c.sql[checkSQL], append(args, nil)...)
	case w.apart:
		batch.Queue(c.sql[checkSQL], append(args, w.pos.stored())...)
	default:
		batch.Queue(c.sql[advanceSQL], append(args, w.pos.stored(), last.Offset+1, last.Time)...).
			QueryRow(func(row pgx.Row) error { return row.Scan(stored) })
	}
}

// round describes the last round trip of a transaction.
type round struct {
	done      int // statements that succeeded
	published int // the first ones: what handlers published
	letters   []letter
	all       int
	idle      bool // before it, nothing was sent for IdleTimeout
}

// findOrigin finds the origin of a failure of the last round trip. It is shared by handlers and
// engine: what a handler left behind (its role, its silence, what it published) can make the engine's
// statements fail. If these succeed without the handler, the handler is at fault.
func (c *Consumer) findOrigin(ctx context.Context, t *tx, w *work, s *selection, f *failure, r round) {
	code := f.state()
	switch {
	case handlertx.Ended(f.err):
		f.origin, f.err = originStatement, Permanent(errors.Join(errEnded, f.err))
	case code == "" && len(s.handle) > 0 && r.idle && c.cfg.Dedup == DedupByID:
		f.origin, f.lost, f.err = originHandler, false, errors.Join(errIdle, f.err)
	case code == "", r.done >= r.all-1:
		f.origin = originCommit // without a SQLSTATE the answer is missing: COMMIT may have succeeded
	case f.verdict() == verdictFenced, f.verdict() == verdictRepeat:
	case r.done < r.published && (slices.Contains([]string{"22", "23", "54", "P0"}, code[:2]) || code == pgerr.InsufficientPrivilege):
		// What a handler published: a value, or a topic that a policy or a trigger refuses.
		f.origin, f.msg = originStatement, t.publisher(r.done)
	case r.letter(f) != nil:
		f.letter = r.letter(f)
	case len(s.handle) == 0:
	default:
		if pgerr.Is(f.err, pgerr.IdleTransactionTimeout, pgerr.TransactionTimeout) {
			f.origin, f.lost, f.err = originHandler, false, errors.Join(errIdle, f.err)
			return
		}
		t.end(ctx)
		f.closes = c.closesWithout(ctx, w, s)
	}
}

// errClosing is joined to a failure of the engine's last statements that the handler caused.
var errClosing = errors.New("the statements that end the transaction failed behind the handler, and succeed without it: look for what it leaves behind (a setting, a long silence, what it publishes)")

// closesWithout reports whether the engine's last statements succeed in a transaction without the
// handler. It rolls back.
func (c *Consumer) closesWithout(ctx context.Context, w *work, s *selection) bool {
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	tx, err := c.pool.Begin(ctx)
	if err != nil {
		return false
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	batch, stored := &pgx.Batch{}, int64(0)
	batch.Queue(c.sql[settingsSQL], c.timeout[0], c.timeout[1], c.timeout[2])
	if _, refused := c.queueFailures(ctx, batch, w, s); refused != nil {
		return false
	}
	c.queuePosition(batch, w, &stored)
	return tx.SendBatch(ctx, batch).Close() == nil
}

// end rolls back an uncommitted transaction. If ROLLBACK cannot be sent in time, it closes the
// connection, which rolls back, too.
func (t *tx) end(ctx context.Context) {
	t.over.Store(true)
	if t.busy.Load() {
		return // a goroutine of the handler uses the connection: see giveBack
	}
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
