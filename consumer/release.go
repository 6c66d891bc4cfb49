package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/outbox"
)

// loadHeld reads, after an acquisition, which keys are held: no earlier holder can commit any more. It
// reads the first parked message of each key of the partition: where these are so many that it takes longer
// than StatementTimeout, the partition waits until that is raised.
func (p *partition) loadHeld() error {
	c := p.consumer
	if !c.holdsKeys() {
		return nil
	}
	ctx, cancel := c.bounded(p.ctx)
	defer cancel()
	held := map[keyHash]struct{}{}
	rows, err := c.pool.Query(ctx, c.sql[headsSQL], p.name.ID(), p.pos.topic, p.pos.partition)
	if err == nil {
		err = readHashes(held)(rows)
	}
	if err != nil {
		return fmt.Errorf("read parked keys: %w", err)
	}
	p.held.add(held)
	return nil
}

// due is a parked message that must be retried: the first one of its key.
type due struct {
	seq   int64
	hash  []byte // of the key; nil: it has none
	tried bool   // it was attempted before, so it is handled alone
}

// dueMax bounds how many due messages one query reads.
const dueMax = 1000

// due lists parked messages that must be retried now.
func (p *partition) due() ([]due, error) {
	c := p.consumer
	ctx, cancel := c.bounded(p.ctx)
	defer cancel()
	rows, err := c.pool.Query(ctx, c.sql[dueSQL], pgx.QueryExecModeCacheDescribe, p.name.ID(), p.pos.topic, p.pos.partition, dueMax, c.holdsKeys())
	if err == nil {
		var list []due
		list, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (d due, err error) {
			err = row.Scan(&d.seq, &d.hash, &d.tried)
			return d, err
		})
		if err == nil {
			return list, nil
		}
	}
	return nil, fmt.Errorf("read parked messages: %w", err)
}

// release retries due messages, and in order the messages behind them; one that was tried before
// alone. The attempt is counted and committed before it begins: a message may end the process.
// Messages that are not done are chosen again when they are due. It returns false if there was none to
// retry: an operator has locked or discarded them. Then the next poll looks, and the lane is free.
func (l *lane) release(list []due) bool {
	ctx, limit := l.p.ctx, l.batch()
	if list[0].tried {
		limit = 1
	}
	msgs, err := l.released(ctx, limit, list)
	if err != nil && !l.p.stopped() {
		l.p.warn("could not read due parked messages; will retry", err)
	}
	if len(msgs) == 0 {
		if l.p.given != nil { // Deliver does not poll
			pause.For(l.p.active, l.p.consumer.watchEvery)
		}
		return false
	}
	crashpoint.At(ctx, crashpoint.ConsumerReleasing)
	for _, msg := range msgs {
		if msg.large {
			l.setBack(msg, &parking{reason: reasonTooLarge, err: errNotStored, attempts: msg.attempts - 1})
			l.later.add(msg, next{})
		} else if msg.attempts > l.p.consumer.cfg.AttemptsMax && msg.counted {
			msg.attempts--
			msg.park = &parking{reason: reasonCrashed, err: fmt.Errorf("attempt %d did not end, and Config.AttemptsMax is %d: the message seems to end the process", msg.attempts, l.p.consumer.cfg.AttemptsMax), attempts: msg.attempts}
			l.p.reportParking(msg, msg.park)
		}
	}
	msgs = slices.DeleteFunc(msgs, func(msg *Message) bool { return msg.large })
	if !l.process(msgs) { // attempts that did not begin, or that the stop ended, do not count
		var seqs []int64
		for _, msg := range msgs {
			if msg.counted {
				seqs = append(seqs, msg.row)
			}
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), markMax)
		defer cancel()
		_, _ = l.p.consumer.pool.Exec(ctx, l.p.consumer.sql[uncountSQL], seqs)
	}
	return true
}

var errNotStored = errors.New("the message was too large to be stored as a whole: it cannot be retried, only discarded")

// releaseBytesMax bounds the bytes of parked messages in memory.
const releaseBytesMax = 16 << 20

// released reads the messages to retry, and stores the time of the release: the IDs of messages
// that they publish contain it.
func (l *lane) released(ctx context.Context, limit int, list []due) ([]*Message, error) {
	ctx, cancel := l.p.consumer.bounded(ctx)
	defer cancel()
	seqs := make([]int64, len(list))
	for i, d := range list {
		seqs[i] = d.seq
	}
	behind := limit / max(len(seqs), 1) // for each due message, so that few messages are read and not handled
	rows, err := l.p.consumer.pool.Query(ctx, l.p.consumer.sql[releaseSQL], l.p.name.ID(), l.p.pos.topic, l.p.pos.partition, limit, releaseBytesMax, seqs, behind)
	if err != nil {
		return nil, fmt.Errorf("read parked messages: %w", err)
	}
	msgs, err := pgx.CollectRows(rows, l.parkedMessage)
	if err != nil {
		return nil, fmt.Errorf("read parked messages: %w", err)
	}
	slices.SortFunc(msgs, func(a, b *Message) int { return cmp.Compare(a.row, b.row) })
	return msgs, nil
}

func (l *lane) parkedMessage(row pgx.CollectableRow) (*Message, error) {
	msg := &Message{Topic: l.p.pos.topic, Partition: l.p.pos.partition, scope: l.p.scope, alias: l.p.alias, named: true}
	var id [16]byte
	var topicID *[16]byte
	var headers []byte
	var at *time.Time
	err := row.Scan(&msg.row, &id, &topicID, &msg.Offset, &msg.Key, &msg.Value, &headers, &at, &msg.released, &msg.attempts, &msg.counted, &msg.large)
	if err != nil {
		return nil, err
	}
	msg.ID = id
	if topicID != nil {
		msg.topicID = *topicID
	}
	if at != nil {
		msg.Time = *at
	}
	if msg.Headers, err = outbox.DecodeHeaders(headers); err != nil {
		msg.park = &parking{reason: reasonInvalid, err: fmt.Errorf("its stored headers: %w", err)}
	}
	return msg, nil
}

// queueLock locks the parked rows: the transaction that locks a row handles its message. The
// messages are claimed again, in case their claims were forgotten.
func (c *Consumer) queueLock(batch *pgx.Batch, w *work, got *claimed) (decide func()) {
	there := make(map[int64]bool, len(w.msgs))
	batch.Queue(c.sql[lockParkedSQL], w.rows(w.msgs)).Query(func(rows pgx.Rows) error {
		var seq int64
		_, err := pgx.ForEachRow(rows, []any{&seq}, func() error {
			there[seq] = true
			return nil
		})
		return err
	})
	if c.cfg.Dedup == DedupByID {
		c.claims.Queue(batch, w.consumer, claims(w.msgs))
	}
	return func() {
		got.fresh = make([]bool, len(w.msgs))
		for i, msg := range w.msgs {
			got.fresh[i] = there[msg.row]
		}
	}
}

func (w *work) rows(msgs []*Message) []int64 {
	rows := make([]int64, len(msgs))
	for i, msg := range msgs {
		rows[i] = msg.row
	}
	return rows
}

// setBack stores that a message failed again: it stays parked for an operator, or until its next
// attempt. If storing fails, the message is retried sooner.
func (l *lane) setBack(msg *Message, why *parking) {
	l.works(msg)
	l.p.reportParking(msg, why)
	ctx, cancel := l.p.consumer.bounded(l.p.ctx)
	defer cancel()
	_, err := l.p.consumer.pool.Exec(ctx, l.p.consumer.sql[setBackSQL], msg.row, why.state(false), why.reason, bounds.ErrorText(why.err), why.attempts, why.wait)
	if err != nil {
		l.p.log(slog.LevelWarn, "could not store the failure of a parked message; it is retried sooner", "id", msg.ID, "error", err)
	}
}
