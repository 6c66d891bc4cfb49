package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/internal/say"
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
	alias string // what the topic is called in IDs
	// idSources are the headers that carry the messages' IDs.
	idSources []dedup.IDSource
	breaker   *breaker
	suspects  *atomic.Int64   // messages that the last holder may have been handling when it ended
	back      map[string]bool // keys whose message was set back during a release
	troubled  bool            // the position says why it does not continue
	loads     int             // failed attempts to load the held keys
	size      int             // of the next batch: see pace

	committed func(last *Message, out outcome)
	// refused is called when the position was refused: the lane stops, and the partition is acquired
	// again.
	refused func(f *failure)
	over    bool // it was
	// later is what a worker must postpone of its share; nil: the lane itself waits.
	later *postponed

	does  laneState
	noted func(who any, does laneState) // called when does has changed; nil with Deliver

	said     say.Lines
	problems []string // that keep messages from being handled
}

func (l *lane) stopped() bool {
	select {
	case <-l.stopping:
		return true
	default:
		return l.over || l.ctx.Err() != nil
	}
}

// batchBegins is the size of the first transaction of a lane. After a crash in it, so many messages
// are suspects.
const batchBegins = 16

// batch is the size of the next transaction.
func (l *lane) batch() int {
	if l.engine.alone.Load() {
		return 1
	}
	return min(max(l.size, 1), l.engine.cfg.BatchMax)
}

// pace adapts the size of the next transaction: it doubles as long as a transaction takes less than
// BatchTimeMax, so that a stop or a rebalance never waits for more, nor repeats more.
func (l *lane) pace(n int, took time.Duration) {
	fits := int(float64(n) * float64(l.engine.cfg.BatchTimeMax) / float64(max(took, 1)))
	switch {
	case fits < l.size:
		l.size = max(fits, 1)
	case n >= l.size:
		l.size = min(2*l.size, fits, l.engine.cfg.BatchMax)
	}
}

// process handles or parks every message. It returns false if the lane must stop: then the next
// holder resumes at the stored position.
func (l *lane) process(msgs []*Message) bool {
	for len(msgs) > 0 {
		n := min(len(msgs), l.batch())
		if !l.finish(msgs[:n]) {
			return false
		}
		msgs = msgs[n:]
	}
	return true
}

// finish handles or parks messages that share a transaction. It returns false if the lane must
// stop.
func (l *lane) finish(msgs []*Message) bool {
	waits, losses := 0, 0
	for {
		if msgs = l.inOrder(msgs); len(msgs) == 0 {
			return true
		}
		if l.stopped() {
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
		if f.closes || f.lost && f.origin != originEngine && v == verdictWait && !l.mustTakeBack(f) {
			// If that recurs with the same messages while the database answers, one of them ends its
			// session, or spoils it. It is blamed only if it is alone.
			if losses++; losses > 1 && (f.closes || l.databaseAnswers()) {
				if v = verdictCount; len(msgs) > 1 {
					v = verdictDivide
				}
			}
		}
		if f.closes && v == verdictCount {
			f.origin, f.err = originHandler, errors.Join(errClosing, f.err)
		}
		ok := true
		switch {
		case errors.Is(f.err, errSession):
			return l.process(msgs)
		case f.letter != nil:
			cmp.Or(f.letter.original, f.letter.Message).park = f.letter.keep(f.err)
		case v == verdictFenced:
			ok = l.fenced(f)
		case v == verdictRepeat, v == verdictWait, v == verdictDivide && len(msgs) == 1:
			waits++
			ok = l.wait(waits, f)
		case v == verdictDivide, f.msg == nil && len(msgs) > 1:
			half := (len(msgs) + 1) / 2
			l.size = max(1, min(l.size, half))
			ok = l.finish(msgs[:half])
			waits, losses, msgs = 0, 0, msgs[half:]
		default:
			msgs, ok = l.settle(msgs, f, v)
			waits, losses = 0, 0
		}
		if !ok {
			return false
		}
	}
}

// inOrder leaves out what waits for another message: a released one behind one that was set back, and
// what a worker must postpone.
func (l *lane) inOrder(msgs []*Message) []*Message {
	if len(l.back) == 0 && (l.later == nil || len(l.later.waits) == 0) {
		return msgs
	}
	return slices.DeleteFunc(slices.Clone(msgs), func(msg *Message) bool {
		if msg.row != 0 {
			return msg.Key != nil && l.back[string(msg.Key)]
		}
		return l.later != nil && l.later.takes(msg)
	})
}

// settle finishes the messages before the failed one, decides about that one, and returns the
// messages that are left. It returns false if the lane must stop.
func (l *lane) settle(msgs []*Message, f *failure, v verdict) (left []*Message, ok bool) {
	at := max(slices.Index(msgs, f.msg), 0)
	if at > 0 && !l.finish(msgs[:at]) {
		return nil, false
	}
	msgs = msgs[at:]
	next := l.judge(msgs[0], f, v)
	switch {
	case next.back:
		if l.engine.holdsKeys() && msgs[0].Key != nil {
			l.back[string(msgs[0].Key)] = true
		}
		return msgs[1:], true
	case next.wait > 0 && l.later != nil && msgs[0].row == 0:
		l.later.add(msgs[0], next, l.engine.holdsKeys())
		return msgs[1:], true
	case next.wait > 0:
		l.pause(next.wait)
	}
	if l.stopped() {
		return nil, false
	}
	if len(msgs) == 1 || msgs[0].park != nil {
		return msgs, true // it is tried again, or parked together with the following messages
	}
	return msgs[1:], l.finish(msgs[:1]) // it is tried again alone
}

// try handles messages once, in one transaction.
func (l *lane) try(msgs []*Message) *failure {
	if len(msgs) == 1 && msgs[0].first.IsZero() {
		msgs[0].first = time.Now()
	}
	for _, msg := range msgs {
		if l.suspects.Load() > 0 && msg.row == 0 && msg.park == nil {
			msg.park = &parking{reason: reasonCrashed, err: errSuspect, retry: true}
		}
	}
	w := l.work
	w.msgs = msgs
	out, f := l.engine.apply(l.ctx, &w)
	if f != nil {
		return f
	}
	l.work.held.free(out.unheld)
	l.work.pos.set(w.stored)
	l.works()
	l.become(StateRunning, nil)
	for _, parked := range out.parked {
		if parked.Reason == reasonCrashed && parked.Retry {
			l.suspects.Add(-1) // duplicates are none
		}
	}
	for _, msg := range msgs {
		msg.counted = false
		if msg.blocks {
			l.noted(msg, laneState{state: StateRunning})
		}
	}
	if l.troubled && w.released() {
		l.storeTrouble(nil) // otherwise the position's next advance removes it
	}
	l.troubled = false
	if !w.released() {
		l.breaker.noteHandled(out.fresh)
		l.pace(len(msgs), out.claim+out.handle+out.commit)
	}
	l.committed(msgs[len(msgs)-1], out)
	l.tell(&w, out)
	crashpoint.At(l.ctx, crashpoint.ConsumerMarked)
	return nil
}

const (
	// conflictsMax is how many attempts in a row that another transaction ended (a deadlock, a
	// serialization failure) are not counted: they say nothing about the message. A handler that
	// always conflicts is counted once in so many attempts, and so parked in the end.
	conflictsMax = 10
	// inPlaceMax is how long after its first attempt alone a message is tried again in place. After
	// that it is parked until its next attempt, and only its key waits.
	inPlaceMax = time.Second
)

// next is what happens to a message after a failed attempt: it is tried again after wait, or parked
// at once (0), or it was set back to wait in parked_messages.
type next struct {
	wait  time.Duration
	pause bool // the whole partition waits
	back  bool
}

// judge decides what happens to a message after a failed attempt.
func (l *lane) judge(msg *Message, f *failure, v verdict) next {
	cfg := &l.engine.cfg
	if v == verdictCount && pgerr.Is(f.err, pgerr.SerializationFailure, pgerr.Deadlock) && msg.conflicts < conflictsMax {
		msg.conflicts++
		wait := l.engine.backoff(msg.conflicts)
		l.become(StateRunning, f.err)
		l.report(msg, "message met a concurrent transaction; will retry", f.err, "conflicts", msg.conflicts, "retry_in", wait)
		return next{wait: wait}
	}
	msg.conflicts = 0
	if msg.park != nil { // parking it failed
		l.blocked(msg, StateBlocked, &parking{reason: msg.park.reason, err: f.err, attempts: msg.attempts}, "message cannot be parked and blocks its partition", cfg.RetryMax)
		return next{wait: cfg.RetryMax, pause: true}
	}
	if !msg.counted {
		msg.attempts++
	}
	msg.counted = false
	if cfg.Hooks.Failed != nil {
		failed := Failed{Message: msg, Attempt: msg.attempts, Err: f.err, Permanent: v == verdictPark, Origin: f.origin.String()}
		l.hook(func() { cfg.Hooks.Failed(failed) })
	}
	if msg.first.IsZero() { // it failed together with others
		msg.first = time.Now()
	}
	final := v == verdictPark || msg.attempts >= cfg.AttemptsMax
	why := &parking{reason: f.reason(v), err: f.err, attempts: msg.attempts, retry: !final, wait: l.engine.backoff(msg.attempts)}
	var later *retryAfterError
	if errors.As(f.err, &later) {
		why.wait = max(why.wait, later.after)
	}
	switch {
	case msg.row != 0 && final && cfg.OnFailure == OnFailureDeadLetter:
		msg.park = why
		l.report(msg, "parked message failed again and is "+cfg.OnFailure.past(), f.err, "attempts", msg.attempts, "reason", why.reason)
		return next{}
	case msg.row != 0:
		l.become(StateRunning, nil) // the database answers, and nothing waits for the message
		l.setBack(msg, why)
		return next{back: true}
	case cfg.OnFailure == OnFailureBlock:
		wait := why.wait
		if v == verdictPark {
			wait = cfg.RetryMax // only a new version of the handler can help
		}
		l.blocked(msg, StateBlocked, why, "message fails and blocks its partition until it succeeds", wait)
		return next{wait: wait}
	case !final && why.wait < inPlaceMax-time.Since(msg.first):
		l.become(StateRunning, f.err)
		l.report(msg, "message failed; will retry", f.err, "attempts", msg.attempts, "attempts_max", cfg.AttemptsMax, "retry_in", why.wait)
		return next{wait: why.wait}
	case !msg.named:
		msg.unknowable(f.err)
		why.retry = false
	case !l.breaker.allows() && !errors.Is(f.err, errTombstone):
		msg.attempts-- // it says more about what the handler needs than about the message
		wait := max(why.wait, cfg.RetryMax)
		l.blocked(msg, StatePausedByBreaker, why,
			fmt.Sprintf("too many messages fail: more than %v of the last %d; the partition pauses instead of parking, and retries", cfg.ParkShareMax, breakerWindow), wait)
		return next{wait: wait, pause: true}
	default:
		msg.park = why
	}
	if !errors.Is(f.err, errTombstone) {
		l.breaker.noteParked()
	}
	if why.retry {
		l.report(msg, "message failed and waits in parked_messages for its next attempt", f.err, "attempts", msg.attempts, "attempts_max", cfg.AttemptsMax, "retry_in", why.wait)
	} else {
		l.report(msg, "message cannot be handled and is "+cfg.OnFailure.past(), f.err, "attempts", msg.attempts, "reason", why.reason)
	}
	return next{}
}

// fenced stops the lane: its partition is acquired again. It returns false.
func (l *lane) fenced(f *failure) bool {
	l.over = true
	l.become(StateFenced, f.err)
	l.refused(f)
	return false
}

// mustTakeBack: without claims only the position shows whether a COMMIT without an answer was applied.
// Acquiring the position again also fences that COMMIT if it is still in progress.
func (l *lane) mustTakeBack(f *failure) bool {
	return l.engine.cfg.Dedup == DedupByPosition && f.origin == originCommit
}

// wait pauses after a failure that no message caused. It returns false if the lane must stop.
func (l *lane) wait(waits int, f *failure) bool {
	if l.mustTakeBack(f) {
		return l.fenced(f)
	}
	wait, text := l.engine.backoff(waits), "partition waits for the database; nothing is lost"
	if errors.Is(f.err, errPool) {
		text = "partition waits for a connection of the pool: raise its MaxConns, or run more replicas"
	}
	l.blocks(slog.LevelWarn, text, f.err, "origin", f.origin.String(), "attempt", waits, "retry_in", wait)
	if waits%waitsStored == 0 {
		l.store(fmt.Sprintf("%s, attempt %d: %v", text, waits, f.err))
	}
	state := StateWaitingForDatabase
	if errors.Is(f.err, errManyAbandoned) {
		state = StateBlocked
	} else if waits < waitsStored && l.engine.verdict(f) == verdictRepeat {
		state = StateRunning // a conflict with a concurrent transaction is not an outage
	}
	l.become(state, f.err)
	l.pause(wait)
	return !l.stopped()
}

// waitsStored is after how many consecutive waits the reason is stored in the position, where
// operators see it.
const waitsStored = 5

// databaseAnswers reports whether the database answers on another connection.
func (l *lane) databaseAnswers() bool {
	ctx, cancel := context.WithTimeout(l.ctx, answerGrace)
	defer cancel()
	var primary bool
	return l.engine.pool.QueryRow(ctx, l.engine.sql[primarySQL]).Scan(&primary) == nil && primary
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
