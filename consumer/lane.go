package consumer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/pgerr"
)

// lane handles the messages of a partition in order, transaction by transaction, until each is
// handled or parked. A partition has one lane, and one more for each worker if messages are handled
// in parallel. docs/design.md has the table of its states.
type lane struct {
	engine *engine
	ctx    context.Context //nolint:containedctx // the life of the lane; when it ends, transactions roll back
	// stopping: once closed, no further transaction and no further attempt begins.
	stopping <-chan struct{}

	work  work   // except its messages
	scope string // the consumer's name
	// idSources are the headers that carry the messages' IDs.
	idSources []dedup.IDSource
	breaker   *breaker
	careful   *careful
	loads     int               // failed attempts to load the held keys
	tried     map[uuid.UUID]int // attempts by earlier holders

	committed func(last *Message, out outcome)
	// regain takes the position over again after it was fenced. errWentBack: the database lost
	// commits.
	regain func(ctx context.Context) error
	// restart ends the session, so that the partition is assigned again.
	restart func(error)

	does  laneState
	noted func(*lane) // called when does has changed; nil with Deliver

	refused refusals // of the position, by another holder
	said    repeated
	// saidParked is about messages that were parked without an attempt.
	saidParked repeated
}

// careful counts how many messages are still handled alone, with the attempt counted before it
// begins, because one of them may have ended the last holder's process. The lanes of a partition
// share it.
type careful struct {
	left atomic.Int64
	from int64 // offset of the first of them: earlier messages were handled
}

// concerns reports whether a message is one of them.
func (c *careful) concerns(msg *Message) bool {
	return c.left.Load() > 0 && (msg.row != 0 || msg.Offset >= c.from)
}

func (c *careful) done(msgs []*Message) {
	if last := msgs[len(msgs)-1]; last.row != 0 || last.Offset >= c.from {
		c.left.Add(-int64(len(msgs)))
	}
}

func (l *lane) stopped() bool {
	select {
	case <-l.stopping:
		return true
	default:
		return l.ctx.Err() != nil
	}
}

// process handles or parks every message. It returns false if the lane must stop: then the next
// holder resumes at the stored position.
func (l *lane) process(msgs []*Message) bool {
	for len(msgs) > 0 {
		n := l.together(msgs)
		if !l.finish(msgs[:n]) {
			return false
		}
		msgs = msgs[n:]
	}
	return true
}

// together returns how many of the messages share the next transaction.
func (l *lane) together(msgs []*Message) int {
	n := 0
	for n < len(msgs) && !l.careful.concerns(msgs[n]) {
		n++
	}
	return max(n, 1)
}

// step is what a lane does next with messages whose transaction failed.
type step uint8

const (
	// stepAgain: wait, then the same messages.
	stepAgain step = iota
	// stepRegain: take the position over again, then the same messages.
	stepRegain
	// stepHalves: the first half, then the second one.
	stepHalves
	// stepCulprit: the messages before the failed one, then judge the failed one, then the rest.
	stepCulprit
)

// next is the step after a failure of n messages.
func (f *failure) next(v verdict, n int) step {
	switch {
	case v == verdictFenced:
		return stepRegain
	case v == verdictRepeat, v == verdictWait, v == verdictDivide && n == 1:
		return stepAgain
	case v == verdictDivide, f.index == unknownIndex && n > 1:
		return stepHalves
	default:
		return stepCulprit
	}
}

// finish handles or parks messages that share a transaction. It returns false if the lane must
// stop, or if a parked message stays parked: the messages behind it stay parked, too.
func (l *lane) finish(msgs []*Message) bool {
	waits, losses := 0, 0
	for len(msgs) > 0 {
		if l.stopped() || !l.admit(msgs) {
			return false
		}
		f := l.try(msgs)
		if f == nil {
			return true
		}
		if l.stopped() {
			return false
		}
		v := l.engine.verdict(f)
		if f.lost && f.origin != originCommit && f.origin != originEngine {
			if losses++; losses > 1 && l.databaseAnswers() {
				v = recurring(len(msgs))
			}
		}
		ok := true
		switch f.next(v, len(msgs)) {
		case stepAgain:
			waits++
			ok = l.wait(waits, f)
		case stepRegain:
			ok = l.takeBack(f)
		case stepHalves:
			half := (len(msgs) + 1) / 2
			ok = l.finish(msgs[:half])
			waits, losses, msgs = 0, 0, msgs[half:]
		case stepCulprit:
			at := max(f.index, 0)
			ok = at == 0 || l.finish(msgs[:at])
			msgs = msgs[at:]
			if others, own := l.beside(msgs); ok && len(others) > 0 {
				msgs, ok = own, l.finish(others)
			}
			if ok {
				msgs, ok = l.settle(msgs, f, v)
			}
			waits, losses = 0, 0
		}
		if !ok {
			return false
		}
	}
	return true
}

// recurring is the verdict if the engine's connection is lost repeatedly with the same n messages
// while the database answers: one of them may end its session. A message is blamed only if it is
// alone.
func recurring(n int) verdict {
	if n > 1 {
		return verdictDivide
	}
	return verdictCount
}

// beside splits messages into those that need not wait for the first one, which failed, and the
// first one with all others of its key. In the single lane, and behind a parked message, all of
// them wait.
func (l *lane) beside(msgs []*Message) (others, own []*Message) {
	if !l.work.apart || msgs[0].row != 0 {
		return nil, msgs
	}
	for i, msg := range msgs {
		if i == 0 || l.engine.cfg.Order == OrderByKey && msg.Key != nil && bytes.Equal(msg.Key, msgs[0].Key) {
			own = append(own, msg)
		} else {
			others = append(others, msg)
		}
	}
	return others, own
}

// settle decides what happens to the first of the messages, whose attempt failed, and returns the
// remaining ones.
func (l *lane) settle(msgs []*Message, f *failure, v verdict) ([]*Message, bool) {
	if !l.judge(msgs[0], f, v) {
		return nil, false
	}
	if len(msgs) == 1 || msgs[0].park != nil {
		return msgs, true // it is retried, or parked together with the following messages
	}
	return msgs[1:], l.finish(msgs[:1]) // it is retried alone
}

// admit counts an attempt before it begins if the message may have killed its consumer: an attempt
// that ends with the process must count, too. It returns false if the message must not be tried.
func (l *lane) admit(msgs []*Message) bool {
	msg := msgs[0]
	if len(msgs) > 1 || !l.careful.concerns(msg) || msg.counted || msg.park != nil {
		return true
	}
	if !l.count(msg, nil) {
		return false
	}
	if msg.attempts <= l.engine.cfg.AttemptsMax || l.engine.cfg.OnFailure == OnFailureBlock {
		return true
	}
	why := &parking{reasonCrashed, fmt.Errorf("attempt %d began and did not end: the message seems to end the process", msg.attempts-1), msg.attempts - 1}
	if msg.row != 0 {
		l.setBack(msg, "parked", why, 0)
		return false
	}
	msg.park = why
	l.report(msg, "message is parked: it seems to end the process", why.err, "attempts", why.attempts)
	return true
}

// count counts an attempt at a message in the database. It retries until the count is stored or the
// lane stops.
func (l *lane) count(msg *Message, last error) bool {
	var text *string
	if last != nil {
		said := bounds.ErrorText(last)
		text = &said
	}
	for waits := 1; ; waits++ {
		ctx, cancel := l.engine.bounded(l.ctx)
		err := l.engine.pool.QueryRow(ctx, l.engine.sql.attempt, l.work.consumer.ID(), [16]byte(msg.ID), text).Scan(&msg.attempts)
		cancel()
		if err == nil {
			msg.counted = true
			crashpoint.At(l.ctx, crashpoint.ConsumerAttempted)
			return true
		}
		if l.stopped() || !l.wait(waits, &failure{origin: originEngine, index: unknownIndex, err: fmt.Errorf("count an attempt: %w", err)}) {
			return false
		}
	}
}

// try handles messages once, in one transaction.
func (l *lane) try(msgs []*Message) *failure {
	if len(l.tried) > 0 {
		for _, msg := range msgs {
			msg.attempts = max(msg.attempts, l.tried[msg.ID])
		}
	}
	w := l.work
	w.msgs = msgs
	out, f := l.engine.apply(l.ctx, &w)
	if f != nil {
		return f
	}
	l.work.held.free(out.unheld)
	if w.stored != nil {
		l.work.pos.stored = w.stored
	}
	l.said.end(l)
	l.become(StateRunning, nil)
	l.careful.done(msgs)
	if !w.released() {
		l.breaker.noteHandled(out.fresh)
	}
	l.committed(msgs[len(msgs)-1], out)
	l.tell(&w, out)
	crashpoint.At(l.ctx, crashpoint.ConsumerMarked)
	return nil
}

// conflictsMax is how many attempts in a row that another transaction ended (a deadlock, a
// serialization failure) are not counted: they say nothing about the message. A handler that always
// conflicts is counted once in so many attempts, and so parked in the end.
const conflictsMax = 10

// judge decides what happens to a message after a failed attempt: either it is marked to be parked,
// or the lane has waited and the message must be retried. It returns false if the lane must stop,
// or if the message stays parked.
func (l *lane) judge(msg *Message, f *failure, v verdict) bool {
	cfg := &l.engine.cfg
	if v == verdictCount && msg.row == 0 && pgerr.Is(f.err, pgerr.SerializationFailure, pgerr.Deadlock) && msg.conflicts < conflictsMax {
		msg.conflicts++
		wait := l.engine.backoff(msg.conflicts)
		l.become(StateRunning, f.err)
		l.report(msg, "message met a concurrent transaction; will retry", f.err, "conflicts", msg.conflicts, "retry_in", wait)
		l.pause(wait)
		return !l.stopped()
	}
	msg.conflicts = 0
	if !msg.counted && !l.count(msg, f.err) {
		return false
	}
	msg.counted = false
	if msg.park != nil { // parking it failed
		l.become(StateBlocked, f.err)
		l.blocked(msg, &parking{msg.park.reason, f.err, msg.attempts}, "message cannot be parked and blocks its partition", cfg.RetryMax)
		l.pause(cfg.RetryMax)
		return !l.stopped()
	}
	if cfg.Hooks.Failed != nil {
		failed := Failed{Message: msg, Attempt: msg.attempts, Err: f.err, Permanent: v == verdictPark, Origin: f.origin.String()}
		l.engine.hook(func() { cfg.Hooks.Failed(failed) })
	}
	if msg.row != 0 {
		l.become(StateRunning, nil) // the database answers, and nothing waits for the message
	}
	why := &parking{f.reason(v), f.err, msg.attempts}
	final := v == verdictPark || msg.attempts >= cfg.AttemptsMax
	wait := l.engine.backoff(msg.attempts)
	var later *retryAfterError
	if errors.As(f.err, &later) {
		wait = max(wait, later.after)
	}
	switch {
	case msg.row != 0 && final:
		l.setBack(msg, "parked", why, 0)
		return false
	case msg.row != 0:
		l.setBack(msg, "retry", why, wait)
		return false
	case cfg.OnFailure == OnFailureBlock:
		if v == verdictPark {
			wait = cfg.RetryMax // only a new version of the handler can help
		}
		l.become(StateBlocked, f.err)
		l.blocked(msg, why, "message fails and blocks its partition until it succeeds", wait)
	case final && !l.breaker.allows():
		wait = max(wait, cfg.RetryMax)
		l.become(StatePausedByBreaker, f.err)
		l.blocked(msg, why, fmt.Sprintf("too many messages fail: more than %v of the last %d; the partition pauses instead of parking, and retries", cfg.ParkShareMax, breakerWindow), wait)
	case final:
		l.breaker.noteParked()
		msg.park = why
		l.report(msg, "message cannot be handled and is "+cfg.OnFailure.past(), f.err, "attempts", msg.attempts, "reason", why.reason)
		return true
	default:
		l.become(StateRunning, f.err)
		l.report(msg, "message failed; will retry", f.err, "attempts", msg.attempts, "attempts_max", cfg.AttemptsMax, "retry_in", wait)
	}
	l.pause(wait)
	return !l.stopped() && l.count(msg, f.err)
}

// wait pauses after a failure that no message caused. It returns false if the lane must stop.
func (l *lane) wait(waits int, f *failure) bool {
	if l.engine.cfg.Dedup == DedupByPosition && f.origin == originCommit {
		// Without claims only the position shows whether a COMMIT without an answer was applied.
		// Taking the position over again also fences that COMMIT if it is still in progress.
		if waits > 1 {
			l.pause(l.engine.backoff(waits))
		}
		return l.takeBack(f)
	}
	wait := l.engine.backoff(waits)
	l.said.blocks(l, slog.LevelWarn, "partition waits for the database; nothing is lost", f.err, "origin", f.origin.String(), "attempt", waits, "retry_in", wait)
	if waits == waitsStored || waits > waitsStored && waits%waitsStored == 0 {
		l.store(fmt.Sprintf("the partition waits for the database, attempt %d: %v", waits, f.err))
	}
	l.become(l.waitState(waits, f), f.err)
	l.pause(wait)
	return !l.stopped()
}

// waitState is the state of a lane that waits. A conflict with a concurrent transaction is not an
// outage.
func (l *lane) waitState(waits int, f *failure) PartitionState {
	switch {
	case errors.Is(f.err, errManyAbandoned):
		return StateBlocked
	case waits < waitsStored && l.engine.verdict(f) == verdictRepeat:
		return StateRunning
	default:
		return StateWaitingForDatabase
	}
}

// waitsStored is after how many consecutive waits the reason is stored in the position, where
// operators see it.
const waitsStored = 5

// databaseAnswers reports whether the database answers on another connection.
func (l *lane) databaseAnswers() bool {
	ctx, cancel := context.WithTimeout(l.ctx, answerGrace)
	defer cancel()
	var primary bool
	return l.engine.pool.QueryRow(ctx, l.engine.sql.primary).Scan(&primary) == nil && primary
}

// pause waits for d, or until the lane must stop.
func (l *lane) pause(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-l.stopping:
	case <-l.ctx.Done():
	}
}
