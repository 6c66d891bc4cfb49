package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/pgerr"
)

// lane handles shares of a partition's messages, in order, transaction by transaction, until each
// message is handled, parked or postponed. docs/design.md has the table of its states.
type lane struct {
	p     *partition
	asks  int        // batches that ask before one is taken as fresh: see asksMax
	size  int        // of the next batch: see pace
	alone int        // so many messages get a transaction each, because a handler changed its session
	later *postponed // what waits of the share
}

func (p *partition) newLane() *lane {
	return &lane{p: p, size: min(batchBegins, p.consumer.cfg.BatchMax), asks: 1}
}

// work handles shares until the partition stops.
func (l *lane) work() {
	p := l.p
	defer p.stop() // a goroutine that ended would leave its keys waiting
	for !p.stopped() {
		next := p.backlog.take(p.consumer.cfg.Workers, l.batch())
		if len(next.lines) == 0 {
			select {
			case <-p.active.Done():
			case <-p.backlog.wake:
			}
			continue
		}
		l.later = &postponed{waits: map[*Message]time.Duration{}, keys: map[string]bool{}, order: p.consumer.cfg.Order}
		found := false
		if len(next.dues) > 0 {
			found = l.release(next.dues)
		} else if !l.process(next.msgs) {
			return
		}
		if p.backlog.done(next, l.later) && found {
			signal(p.looked) // more may be due
		}
		l.works() // what it postponed has a trouble of its own
	}
}

const (
	// batchBegins is the size of a lane's first transaction. After a crash in it, so many messages are suspects.
	batchBegins = 16
	// aloneNext: if each handler changes its session, one transaction in so many is repeated.
	aloneNext = 1000
)

// batch is the size of the next transaction.
func (l *lane) batch() int {
	if l.alone > 0 {
		return 1
	}
	return l.size
}

// pace adapts the size of the next transaction: it doubles as long as a transaction takes less than
// BatchTimeMax, so that a stop or a rebalance never waits for more, nor repeats more.
func (l *lane) pace(n int, took time.Duration) {
	fits := int(float64(n) * float64(l.p.consumer.cfg.BatchTimeMax) / float64(max(took, 1)))
	switch {
	case fits < l.size:
		l.size = max(fits, 1)
	case n >= l.size:
		l.size = min(2*l.size, fits, l.p.consumer.cfg.BatchMax)
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
		if l.p.stopped() {
			return false
		}
		f := l.try(msgs)
		if f == nil || l.p.stopped() {
			return f == nil
		}
		v := f.verdict()
		unknown := l.mustTakeBack(f) && msgs[0].row == 0 // a parked row says itself whether it is done
		if f.closes || f.lost && f.origin != originEngine && v == verdictWait && !unknown {
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
			l.alone = aloneNext
			l.p.consumer.sayAlone.Do(func() { l.p.log(slog.LevelInfo, f.err.Error(), "messages", aloneNext) })
			return l.process(msgs)
		case f.letter != nil:
			cmp.Or(f.letter.original, f.letter.Message).park = f.letter.keep(f.err)
		case v == verdictFenced, unknown && (v == verdictWait || v == verdictRepeat):
			l.p.unclean.Store(v != verdictFenced)
			ok = l.fenced(f)
		case v == verdictDivide && len(msgs) == 1 && msgs[0].row == 0:
			why := &parking{reason: reasonFailed, err: f.err, attempts: msgs[0].attempts}
			l.later.add(msgs[0], l.block(msgs[0], StateBlocked, why, "the database cannot store what belongs to the message, which blocks its partition", next{wait: l.p.consumer.cfg.RetryMax}))
			return true
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

// inOrder leaves out what waits for another message.
func (l *lane) inOrder(msgs []*Message) []*Message {
	if len(l.later.waits) == 0 {
		return msgs
	}
	return slices.DeleteFunc(slices.Clone(msgs), l.later.takes)
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
	case next.back, next.wait > 0 && msgs[0].row == 0:
		l.later.add(msgs[0], next)
		return msgs[1:], true
	case next.wait > 0:
		if alive := pause.For(l.p.active, next.wait); len(msgs) == 1 || !alive {
			return msgs, alive
		}
		return msgs[1:], l.finish(msgs[:1]) // it is tried again alone
	}
	return msgs, !l.p.stopped() // it is parked together with the following messages
}

// try handles messages once, in one transaction.
func (l *lane) try(msgs []*Message) *failure {
	if len(msgs) == 1 && msgs[0].first.IsZero() {
		msgs[0].first = time.Now()
	}
	for _, msg := range msgs {
		if l.p.suspects.Load() > 0 && msg.row == 0 && msg.park == nil {
			msg.park = &parking{reason: reasonCrashed, err: errSuspect, retry: true}
		}
	}
	c, p := l.p.consumer, l.p
	w := &work{consumer: p.name, pos: p.pos, msgs: msgs, held: p.held, apart: c.cfg.Order != OrderByPartition, asks: l.asks > 0}
	out, f := c.apply(p.ctx, w)
	if l.asks = asksAfter(l.asks, out, f); f != nil {
		return f
	}
	p.held.free(out.unheld)
	p.pos.set(w.stored)
	l.works(msgs...)
	for _, parked := range out.parked {
		if errors.Is(parked.Err, errSuspect) {
			l.p.suspects.Add(-1) // duplicates are none
		}
	}
	for _, msg := range msgs {
		msg.counted = false
	}
	l.alone = max(l.alone-1, 0)
	l.pace(len(msgs), out.claim+out.handle+out.commit)
	if !w.released() {
		l.p.breaker.noteHandled(out.fresh)
	}
	if w.stored != nil {
		p.marked(*w.stored)
	}
	p.committed(out)
	p.tell(w, out)
	crashpoint.At(l.p.ctx, crashpoint.ConsumerMarked)
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
	cfg := &l.p.consumer.cfg
	if v == verdictCount && pgerr.Is(f.err, pgerr.SerializationFailure, pgerr.Deadlock) && msg.conflicts < conflictsMax {
		msg.conflicts++
		wait := l.p.consumer.engineBackoff(msg.conflicts)
		l.p.record(msg, &trouble{state: StateRunning, err: f.err})
		l.p.report(msg, "message met a concurrent transaction; will retry", f.err, "conflicts", msg.conflicts, "retry_in", wait)
		return next{wait: wait}
	}
	msg.conflicts = 0
	if msg.park != nil { // parking it failed
		why := &parking{reason: msg.park.reason, err: f.err, attempts: msg.attempts}
		return l.block(msg, StateBlocked, why, "message cannot be parked and blocks its partition", next{wait: cfg.RetryMax, pause: true})
	}
	if !msg.counted {
		msg.attempts++
	}
	msg.counted = false
	if cfg.Hooks.Failed != nil {
		failed := Failed{Message: msg, Attempt: msg.attempts, Err: f.err, Permanent: v == verdictPark, Origin: f.origin.String()}
		l.p.hook(func() { cfg.Hooks.Failed(failed) })
	}
	if msg.first.IsZero() { // it failed together with others
		msg.first = time.Now()
	}
	final := v == verdictPark || msg.attempts >= cfg.AttemptsMax
	why := &parking{reason: f.reason(v), err: f.err, attempts: msg.attempts, retry: !final, wait: backoff(msg.attempts, cfg.RetryMin, cfg.RetryMax)}
	var later *retryAfterError
	if errors.As(f.err, &later) {
		why.wait = max(why.wait, later.after)
	}
	switch {
	case msg.row != 0 && final && cfg.OnFailure == OnFailureDeadLetter:
		msg.park = why
		l.p.reportParking(msg, why)
		return next{}
	case msg.row != 0:
		l.works() // the database answers, and nothing waits for the message
		l.setBack(msg, why)
		return next{back: true}
	case cfg.OnFailure == OnFailureBlock:
		return l.block(msg, StateBlocked, why, "message fails and blocks its partition until it succeeds", next{wait: why.wait})
	case !final && why.wait < inPlaceMax-time.Since(msg.first):
		l.p.record(msg, &trouble{state: StateRunning, err: f.err})
		l.p.report(msg, "message failed; will retry", f.err, "attempts", msg.attempts, "attempts_max", cfg.AttemptsMax, "retry_in", why.wait)
		return next{wait: why.wait}
	}
	return l.park(msg, why)
}

// park marks a message to be parked, unless too many are.
func (l *lane) park(msg *Message, why *parking) next {
	cfg, tombstone := &l.p.consumer.cfg, errors.Is(why.err, errTombstone)
	switch {
	case !msg.named:
		msg.unknowable(why.err)
		why.retry = false
	case !tombstone && !l.p.breaker.allows():
		msg.attempts-- // it says more about what the handler needs than about the message
		text := fmt.Sprintf("too many messages fail: more than %v of the last %d; the partition pauses instead of parking, and retries", cfg.ParkShareMax, breakerWindow)
		return l.block(msg, StatePausedByBreaker, why, text, next{wait: max(why.wait, cfg.RetryMax), pause: true})
	default:
		msg.park = why
	}
	if !tombstone {
		l.p.breaker.noteParked()
	}
	l.p.reportParking(msg, why)
	return next{}
}

// block records that a message blocks.
func (l *lane) block(msg *Message, state PartitionState, why *parking, text string, n next) next {
	stored := fmt.Sprintf("%s: offset %d, message %s, attempt %d: %v", text, msg.Offset, msg.ID, why.attempts, why.err)
	l.p.suffers(msg, slog.LevelError, trouble{state, why.err, text, stored}, "offset", msg.Offset, "id", msg.ID, "attempts", why.attempts, "reason", why.reason, "retry_in", n.wait)
	return n
}

// fenced stops the partition, which is acquired again. It returns false.
func (l *lane) fenced(f *failure) bool {
	l.p.stop()
	l.p.record(l, &trouble{state: StateFenced, err: f.err})
	l.p.refused(f)
	return false
}

// mustTakeBack: without claims only the position shows whether a COMMIT without an answer was applied. Acquiring it
// again also fences that COMMIT if it is still in progress. If that recurs, the messages are suspects.
func (l *lane) mustTakeBack(f *failure) bool {
	return l.p.consumer.cfg.Dedup == DedupByPosition && f.origin == originCommit
}

// wait pauses after a failure that no message caused. It returns false if the lane must stop.
func (l *lane) wait(waits int, f *failure) bool {
	wait := l.p.consumer.engineBackoff(waits)
	t := trouble{state: StateWaitingForDatabase, err: f.err, text: "partition waits for the database; nothing is lost"}
	switch {
	case errors.Is(f.err, errPool):
		t.text = "partition waits for a connection of the pool: raise its MaxConns, or run more replicas"
	case errors.Is(f.err, errManyAbandoned):
		t.state, t.text = StateBlocked, "partition waits for handlers that do not return"
	case waits < waitsStored && f.verdict() == verdictRepeat:
		t.state = StateRunning // a conflict with a concurrent transaction is not an outage
	}
	if waits%waitsStored == 0 {
		t.stored = fmt.Sprintf("%s, attempt %d: %v", t.text, waits, f.err)
	}
	l.p.suffers(l, slog.LevelWarn, t, "origin", f.origin.String(), "attempt", waits, "retry_in", wait)
	return pause.For(l.p.active, wait)
}

// waitsStored is after how many consecutive waits the reason is stored in the position, where
// operators see it.
const waitsStored = 5

// databaseAnswers reports whether the database answers on another connection.
func (l *lane) databaseAnswers() bool {
	ctx, cancel := context.WithTimeout(l.p.ctx, answerGrace)
	defer cancel()
	var primary bool
	return l.p.consumer.pool.QueryRow(ctx, l.p.consumer.sql[primarySQL]).Scan(&primary) == nil && primary
}
