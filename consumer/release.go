package consumer

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/internal/crashpoint"
)

// tendEvery is how often a partition looks for what operators did with its parked messages.
const tendEvery = time.Second

// heads are the first parked messages of their keys.
type heads struct {
	held map[keyHash]struct{}
	due  bool // one is to be tried again now
}

func (l *lane) heads(ctx context.Context) (*heads, error) {
	rows, err := l.consumer.engine.pool.Query(ctx, l.consumer.engine.sql.heads, l.work.consumer.ID(), l.work.pos.topic, l.work.pos.partition)
	if err != nil {
		return nil, fmt.Errorf("read parked keys: %w", err)
	}
	h := &heads{held: map[keyHash]struct{}{}}
	var hash []byte
	var due bool
	_, err = pgx.ForEachRow(rows, []any{&hash, &due}, func() error {
		if hash != nil {
			h.held[keyHash(hash)] = struct{}{}
		}
		h.due = h.due || due
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read parked keys: %w", err)
	}
	return h, nil
}

// load learns, when the partition is taken over, which keys are held. A key whose first message somebody
// deleted goes on with the next.
func (l *lane) load(ctx context.Context) error {
	if _, err := l.consumer.engine.pool.Exec(ctx, l.consumer.engine.sql.mendAll, l.work.consumer.ID(), l.work.pos.topic, l.work.pos.partition); err != nil {
		return fmt.Errorf("look after parked keys: %w", err)
	}
	rows, err := l.consumer.engine.pool.Query(ctx, l.consumer.engine.sql.attempts, l.work.consumer.ID(), attemptsLoadMax)
	if err != nil {
		return fmt.Errorf("read attempts: %w", err)
	}
	var id [16]byte
	var attempts int
	l.tried = map[uuid.UUID]int{}
	_, err = pgx.ForEachRow(rows, []any{&id, &attempts}, func() error {
		l.tried[id] = attempts
		return nil
	})
	if err != nil {
		return fmt.Errorf("read attempts: %w", err)
	}
	h, err := l.heads(ctx)
	if err == nil {
		l.work.held.replace(h.held)
	}
	return err
}

// attemptsLoadMax bounds how many attempts of earlier holders are remembered, so that they can be forgotten
// with the success of their message. What is above it is swept some day.
const attemptsLoadMax = 1000

// reload learns about keys that a COMMIT without an answer may have parked.
func (l *lane) reload(ctx context.Context) error {
	h, err := l.heads(ctx)
	if err == nil {
		l.work.held.add(h.held)
	}
	return err
}

// inPlace fails with errWentBack where the database is behind what this consumer committed. A partition at work
// hears it from its own transactions; one without new records has to ask.
func (l *lane) inPlace(ctx context.Context) error {
	if l.work.pos.stored == nil {
		return nil
	}
	var behind bool
	if err := l.consumer.engine.pool.QueryRow(ctx, l.consumer.engine.sql.behind, l.consumer.engine.cfg.Group, l.work.pos.topic, l.work.pos.partition, *l.work.pos.stored).Scan(&behind); err != nil {
		return fmt.Errorf("read the position: %w", err)
	}
	if behind {
		return errWentBack
	}
	return nil
}

// tend takes notice of what operators did, and tries again what is due, one transaction of it. It returns
// whether there may be more. No other lane of the partition may be at work.
func (l *lane) tend(ctx context.Context) (more bool, err error) {
	h, err := l.heads(ctx)
	if err != nil {
		return false, err
	}
	var gone [][]byte
	for _, key := range l.work.held.list() {
		if _, held := h.held[keyHash(key)]; !held {
			gone = append(gone, key)
		}
	}
	if len(gone) > 0 {
		// The first message of these keys is gone. If others are left, they go on; else the key is free.
		rows, err := l.consumer.engine.pool.Query(ctx, l.consumer.engine.sql.promote, l.work.consumer.ID(), l.work.pos.topic, l.work.pos.partition, gone)
		if err != nil {
			return false, fmt.Errorf("look after parked keys: %w", err)
		}
		left, err := pgx.CollectRows(rows, pgx.RowTo[[]byte])
		if err != nil {
			return false, fmt.Errorf("look after parked keys: %w", err)
		}
		for _, key := range left {
			h.held[keyHash(key)], h.due = struct{}{}, true
		}
	}
	l.work.held.replace(h.held)
	if !h.due {
		return false, nil
	}
	return l.release(ctx)
}

// release tries parked messages again: those that are due, and in their order those behind them.
func (l *lane) release(ctx context.Context) (more bool, err error) {
	limit := l.consumer.engine.cfg.BatchMax
	if l.careful.Load() > 0 {
		limit = 1
	}
	tag, err := l.consumer.engine.pool.Exec(ctx, l.consumer.engine.sql.refuseLarge, l.work.consumer.ID(), l.work.pos.topic, l.work.pos.partition)
	if err != nil {
		return false, fmt.Errorf("read parked messages: %w", err)
	}
	if tag.RowsAffected() > 0 {
		l.consumer.engine.cfg.Logger.ErrorContext(ctx, "messages were handed back that are too large to be stored: they stay parked",
			"group", l.consumer.engine.cfg.Group, "topic", l.work.pos.topic, "partition", l.work.pos.partition, "messages", tag.RowsAffected())
	}
	msgs, err := l.released(ctx, limit)
	if err != nil || len(msgs) == 0 {
		return false, err
	}
	crashpoint.At(ctx, crashpoint.ConsumerReleasing)
	l.process(msgs) // what is not done is chosen again when it is due
	return true, nil
}

// releaseBytesMax bounds what of parked messages is in memory.
const releaseBytesMax = 16 << 20

// released reads what is to be tried again, and stores when: it is the time of what the messages cause.
func (l *lane) released(ctx context.Context, limit int) ([]*Message, error) {
	rows, err := l.consumer.engine.pool.Query(ctx, l.consumer.engine.sql.release, l.work.consumer.ID(), l.work.pos.topic, l.work.pos.partition, limit, releaseBytesMax)
	if err != nil {
		return nil, fmt.Errorf("read parked messages: %w", err)
	}
	msgs, err := pgx.CollectRows(rows, l.parkedMessage)
	if err != nil {
		return nil, fmt.Errorf("read parked messages: %w", err)
	}
	slices.SortFunc(msgs, func(a, b *Message) int { return cmp.Compare(a.row, b.row) })
	return slices.DeleteFunc(msgs, cutBehind(map[keyHash]bool{})), nil
}

// cutBehind takes out what waits for a reason of its own behind another message of its key: when its turn
// comes an operator is to decide about it.
func cutBehind(cut map[keyHash]bool) func(*Message) bool {
	return func(msg *Message) bool {
		if msg.Key == nil {
			return false
		}
		hash := keyHash(sha256.Sum256(msg.Key))
		if msg.park != nil {
			cut[hash] = true
		}
		return cut[hash]
	}
}

func (l *lane) parkedMessage(row pgx.CollectableRow) (*Message, error) {
	msg := &Message{Topic: l.work.pos.topic, Partition: l.work.pos.partition}
	var id [16]byte
	var topicID *[16]byte
	var headers []byte
	var at *time.Time
	var reason, state string
	err := row.Scan(&msg.row, &id, &topicID, &msg.Offset, &msg.Key, &msg.Value, &headers, &at, &reason, &state, &msg.released)
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
	if state == "behind" && reason != reasonBehind {
		msg.park = &parking{reason: reason}
	}
	if msg.Headers, err = headersOf(headers); err != nil {
		return nil, fmt.Errorf("parked message %s: %w", msg.ID, err)
	}
	return msg, nil
}

// queueLock makes the parked rows what decides who handles the messages. Their claims are made again, in case
// they were forgotten.
func (e *engine) queueLock(batch *pgx.Batch, w *work) (decide func() (fresh, conflicts []bool)) {
	there := make(map[int64]bool, len(w.msgs))
	batch.Queue(e.sql.lockParked, w.rows(w.msgs)).Query(func(rows pgx.Rows) error {
		var seq int64
		_, err := pgx.ForEachRow(rows, []any{&seq}, func() error {
			there[seq] = true
			return nil
		})
		return err
	})
	if e.cfg.Dedup == DedupByID || e.cfg.Dedup == DedupByIDAndPayload {
		e.claims.Queue(batch, w.consumer, w.ids())
	}
	return func() ([]bool, []bool) {
		fresh := make([]bool, len(w.msgs))
		for i, msg := range w.msgs {
			fresh[i] = there[msg.row]
		}
		return fresh, nil
	}
}

func (w *work) rows(msgs []*Message) []int64 {
	rows := make([]int64, len(msgs))
	for i, msg := range msgs {
		rows[i] = msg.row
	}
	return rows
}

// queueReleased deletes what was handled; the next message of each key comes first now.
func (e *engine) queueReleased(batch *pgx.Batch, w *work, s *sorting) {
	batch.Queue(e.sql.unpark, w.rows(s.handle))
	var keys [][]byte
	for _, msg := range s.handle {
		if msg.Key != nil {
			hash := sha256.Sum256(msg.Key)
			keys = append(keys, hash[:])
		}
	}
	if len(keys) > 0 {
		batch.Queue(e.sql.promote, w.consumer.ID(), w.pos.topic, w.pos.partition, keys)
	}
}

// setBack leaves a message parked that failed again, for an operator or until its next attempt. It returns
// whether that is stored; if not, the message is tried again sooner.
func (l *lane) setBack(msg *Message, state string, why *parking, wait time.Duration) bool {
	attempts := 0
	if state == "parked" {
		attempts = why.attempts
		l.say(msg, "parked message failed again and stays parked", why.err, "attempts", why.attempts, "reason", why.reason)
	} else {
		l.say(msg, "parked message failed again and is tried later", why.err, "attempts", why.attempts, "retry_in", wait)
	}
	_, err := l.consumer.engine.pool.Exec(l.ctx, l.consumer.engine.sql.setBack, msg.row, state, why.reason, bounds.ErrorText(why.err), attempts, wait, l.work.consumer.ID(), [16]byte(msg.ID))
	if err != nil {
		l.consumer.engine.cfg.Logger.WarnContext(l.ctx, "a parked message could not be set back; it is tried again", "group", l.consumer.engine.cfg.Group, "id", msg.ID, "error", err)
	}
	return err == nil
}
