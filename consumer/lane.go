package consumer

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/internal/crashpoint"
)

// lane works through messages of a partition in order, transaction by transaction. A partition has one, and
// one more for each worker where messages are handled in parallel.
type lane struct {
	consumer *Consumer

	work     work // but its messages
	breaker  *breaker
	careful  *atomic.Int64     // so many messages are still tried alone, and counted first …
	from     int64             // … from this offset on: what comes before was handled
	tried    map[uuid.UUID]int // attempts that earlier holders left behind
	ctx      context.Context   //nolint:containedctx // the life of the lane: its end rolls back
	stopping <-chan struct{}   // no further batch, no further attempt
	stale    bool              // a COMMIT may have parked something that held does not know

	committed func(last *Message, out outcome)
	rehold    func(ctx context.Context) error
	restart   func(error)
}

func (l *lane) stopped() bool {
	select {
	case <-l.stopping:
		return true
	default:
		return l.ctx.Err() != nil
	}
}

// process works until every message is done, or the lane is to stop: then it returns false and the next
// holder goes on from the stored position.
func (l *lane) process(msgs []*Message) bool {
	for len(msgs) > 0 {
		n := l.together(msgs)
		if !l.batch(msgs[:n]) {
			return false
		}
		msgs = msgs[n:]
	}
	return true
}

// together says how many of the messages share the next transaction.
func (l *lane) together(msgs []*Message) int {
	if l.careful.Load() <= 0 {
		return len(msgs)
	}
	n := 0
	for n < len(msgs) && msgs[n].row == 0 && msgs[n].Offset < l.from {
		n++
	}
	return max(n, 1)
}

// batch does messages in one transaction. If it fails it is rolled back and split: what stands before the
// culprit commits, then the culprit's error decides, and the rest follows. Where the culprit is not known (an
// error at COMMIT) the halves are tried. Of parked messages, what follows the culprit waits for another
// time: it returns false.
func (l *lane) batch(msgs []*Message) bool {
	for waits := 0; len(msgs) > 0; {
		if l.stopped() || !l.ready(msgs) {
			return false
		}
		err := l.try(msgs)
		if err == nil {
			return true
		}
		if l.stopped() {
			return false
		}
		var failed *messageError
		switch {
		case errors.Is(err, errFenced), troubleOfDatabase(err), concurrent(err):
			waits++
			if !l.waitOut(waits, err) {
				return false
			}
			continue
		case errors.As(err, &failed):
		case len(msgs) == 1:
			failed = &messageError{0, err}
		default:
			half := (len(msgs) + 1) / 2
			if !l.batch(msgs[:half]) {
				return false
			}
			waits, msgs = 0, msgs[half:]
			continue
		}
		if failed.index > 0 && !l.batch(msgs[:failed.index]) {
			return false
		}
		waits, msgs = 0, msgs[failed.index:]
		if !l.failed(msgs[0], failed.err) {
			return false
		}
		if msgs[0].park == nil { // it is tried again, alone
			if !l.batch(msgs[:1]) {
				return false
			}
			msgs = msgs[1:]
		}
	}
	return true
}

// ready counts an attempt before it begins, where the message may have killed its consumer: an attempt that
// ends with the process must count, too.
func (l *lane) ready(msgs []*Message) bool {
	msg := msgs[0]
	if len(msgs) > 1 || l.careful.Load() <= 0 || msg.row == 0 && msg.Offset < l.from || msg.counted || msg.park != nil {
		return true
	}
	if !l.count(msg, nil) {
		return false
	}
	if msg.attempts <= l.consumer.engine.cfg.AttemptsMax || l.consumer.engine.cfg.OnFailure == OnFailureBlock {
		return true
	}
	why := &parking{reasonCrashed, fmt.Errorf("attempt %d began and did not end: the message seems to end the process", msg.attempts-1), msg.attempts - 1}
	if msg.row != 0 {
		return l.setBack(msg, "parked", why, 0) && false
	}
	msg.park = why
	l.say(msg, "message is parked: it seems to end the process", why.err, "attempts", why.attempts)
	return true
}

// count counts an attempt at a message in the database, and waits until that is done.
func (l *lane) count(msg *Message, last error) bool {
	for waits := 1; ; waits++ {
		var text *string
		if last != nil {
			said := bounds.ErrorText(last)
			text = &said
		}
		err := l.consumer.engine.pool.QueryRow(l.ctx, l.consumer.engine.sql.attempt, l.work.consumer.ID(), [16]byte(msg.ID), text).Scan(&msg.attempts)
		if err == nil {
			msg.counted = true
			crashpoint.At(l.ctx, crashpoint.ConsumerAttempted)
			return true
		}
		if l.stopped() || !l.waitOut(waits, fmt.Errorf("count an attempt: %w", err)) {
			return false
		}
	}
}

// try does a batch once.
func (l *lane) try(msgs []*Message) error {
	if l.stale {
		if err := l.reload(l.ctx); err != nil {
			return err
		}
		l.stale = false
	}
	if len(l.tried) > 0 {
		for _, msg := range msgs {
			msg.attempts = max(msg.attempts, l.tried[msg.ID])
		}
	}
	w := l.work
	w.msgs = msgs
	out, err := l.consumer.engine.apply(l.ctx, &w)
	if err != nil {
		l.stale = true
		return err
	}
	if msgs[0].row != 0 || msgs[0].Offset >= l.from {
		l.careful.Add(-int64(len(msgs)))
	}
	if !w.released() {
		l.breaker.handled(out.fresh)
		if l.consumer.engine.cfg.Hooks.Processed != nil {
			l.consumer.engine.cfg.Hooks.Processed(l.work.pos.topic, out.fresh, out.duplicates)
		}
	}
	l.committed(msgs[len(msgs)-1], out)
	if l.consumer.engine.cfg.Hooks.Parked != nil && out.parked > 0 {
		l.consumer.engine.cfg.Hooks.Parked(l.work.pos.topic, out.parked)
	}
	crashpoint.At(l.ctx, crashpoint.ConsumerMarked)
	return nil
}

// failed decides what becomes of a message after an attempt that failed: it is marked to be parked, or the
// lane has waited and it is to be tried again. It returns false if the lane is to stop, or if the message
// stays parked.
func (l *lane) failed(msg *Message, err error) bool {
	if !msg.counted && !l.count(msg, err) {
		return false
	}
	msg.counted = false
	if msg.park != nil { // it could not even be parked
		wait := l.consumer.engine.cfg.RetryMax
		l.trouble(msg, &parking{msg.park.reason, err, msg.attempts}, "message cannot be parked and blocks its partition", wait)
		l.pause(wait)
		return !l.stopped()
	}
	if l.consumer.engine.cfg.Hooks.Failed != nil {
		l.consumer.engine.cfg.Hooks.Failed(msg, msg.attempts, err)
	}
	reason, permanent := l.consumer.engine.judge(err)
	final := permanent || msg.attempts >= l.consumer.engine.cfg.AttemptsMax
	why := &parking{reason, err, msg.attempts}
	wait := l.consumer.engine.backoff(msg.attempts)
	var later *retryAfterError
	if errors.As(err, &later) {
		wait = max(wait, later.after)
	}
	switch {
	case msg.row != 0 && final:
		return l.setBack(msg, "parked", why, 0) && false
	case msg.row != 0:
		return l.setBack(msg, "retry", why, wait) && false
	case l.consumer.engine.cfg.OnFailure == OnFailureBlock:
		if permanent {
			wait = l.consumer.engine.cfg.RetryMax // only a new version of the handler can help
		}
		l.trouble(msg, why, "message fails and blocks its partition until it succeeds", wait)
	case final && !l.breaker.allows():
		wait = max(wait, l.consumer.engine.cfg.RetryMax)
		l.trouble(msg, why, fmt.Sprintf("too many messages fail: more than %v of the last %d; the partition pauses instead of parking, and tries again", l.consumer.engine.cfg.ParkShareMax, breakerWindow), wait)
	case final:
		l.breaker.parked()
		msg.park = why
		l.say(msg, "message cannot be handled and is "+l.consumer.engine.cfg.OnFailure.past(), err, "attempts", msg.attempts, "reason", reason)
		return true
	default:
		l.say(msg, "message failed and is tried again", err, "attempts", msg.attempts, "attempts_max", l.consumer.engine.cfg.AttemptsMax, "retry_in", wait)
	}
	l.pause(wait)
	return !l.stopped() && l.count(msg, err)
}

// say logs what happened to a message.
func (l *lane) say(msg *Message, text string, err error, attrs ...any) {
	l.consumer.engine.cfg.Logger.ErrorContext(l.ctx, text, append([]any{
		"group", l.consumer.engine.cfg.Group, "topic", msg.Topic, "partition", msg.Partition, "offset", msg.Offset, "id", msg.ID, "error", err,
	}, attrs...)...)
}

// trouble says, in the log and in the database, why the partition stands still.
func (l *lane) trouble(msg *Message, why *parking, text string, wait time.Duration) {
	l.say(msg, text, why.err, "attempts", why.attempts, "reason", why.reason, "retry_in", wait)
	said := bounds.ErrorText(fmt.Errorf("%s: offset %d, message %s, attempt %d: %w", text, msg.Offset, msg.ID, why.attempts, why.err))
	// The log said it already; a database that is away says the rest.
	_, _ = l.consumer.engine.pool.Exec(l.ctx, l.consumer.engine.sql.trouble, l.consumer.engine.cfg.Group, msg.Topic, msg.Partition, l.work.pos.epoch, said)
}

// waitOut pauses after trouble that is no message's fault. It returns false if the lane is to stop.
func (l *lane) waitOut(waits int, err error) bool {
	if errors.Is(err, errFenced) || l.consumer.engine.cfg.Dedup == DedupByPosition {
		// Without claims nothing but the position says whether a COMMIT without an answer came through.
		again := l.rehold(l.ctx)
		if errors.Is(again, errWentBack) {
			l.restart(again)
			return false
		}
		if err = again; err == nil {
			return !l.stopped()
		}
	}
	wait := l.consumer.engine.backoff(waits)
	l.consumer.engine.cfg.Logger.WarnContext(l.ctx, "partition waits for the database; nothing is lost", "group", l.consumer.engine.cfg.Group,
		"topic", l.work.pos.topic, "partition", l.work.pos.partition, "attempt", waits, "error", err, "retry_in", wait)
	l.pause(wait)
	return !l.stopped()
}

// pause waits, unless the lane is to stop.
func (l *lane) pause(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-l.stopping:
	case <-l.ctx.Done():
	}
}
