package consumer

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/effectonce/effectonce/internal/bounds"
)

// warn logs a problem that does not stop messages from being handled: when it begins, then at most
// every 30 s with a count.
func (l *lane) warn(text string, err error, attrs ...any) {
	if times, due := l.said.Due(text, false); due {
		l.log(slog.LevelWarn, text, append([]any{"error", err, "times", times}, attrs...)...)
	}
}

// blocks does the same for a problem that keeps messages from being handled. The next committed
// transaction ends it: see works.
func (l *lane) blocks(level slog.Level, text string, err error, attrs ...any) {
	if times, due := l.said.Due(text, true); due {
		l.log(level, text, append([]any{"error", err, "times", times}, attrs...)...)
	}
	if !slices.Contains(l.problems, text) {
		l.problems = append(l.problems, text)
	}
}

// works logs that messages are handled again.
func (l *lane) works() {
	for _, text := range l.problems {
		if ended, ok := l.said.End(text); ok {
			l.log(slog.LevelInfo, "partition works again", "after", text, "times", ended.Times, "lasted", ended.Lasted)
		}
	}
	l.problems = nil
}

// log writes a line about the lane's partition.
func (l *lane) log(level slog.Level, text string, attrs ...any) {
	for i, attr := range attrs {
		if d, ok := attr.(time.Duration); ok {
			attrs[i] = readable(d)
		}
	}
	l.engine.cfg.Logger.Log(l.ctx, level, text, append([]any{
		"group", l.engine.cfg.Group, "topic", l.work.pos.topic, "partition", l.work.pos.partition,
	}, attrs...)...)
}

// report logs what happened to a message.
func (l *lane) report(msg *Message, text string, err error, attrs ...any) {
	l.log(slog.LevelError, text, append([]any{"offset", msg.Offset, "id", msg.ID, "error", err}, attrs...)...)
}

// blocked records, in the log, in the status and in the database, that a message blocks its partition,
// or its key if workers handle the partition.
func (l *lane) blocked(msg *Message, state PartitionState, why *parking, text string, wait time.Duration) {
	if l.later != nil {
		msg.blocks = true
		l.noted(msg, laneState{state, why.err})
	} else {
		l.become(state, why.err)
	}
	l.blocks(slog.LevelError, text, why.err, "offset", msg.Offset, "id", msg.ID, "attempts", why.attempts, "reason", why.reason, "retry_in", wait)
	l.store(fmt.Sprintf("%s: offset %d, message %s, attempt %d: %v", text, msg.Offset, msg.ID, why.attempts, why.err))
}

// store writes to the position why the partition does not continue. The next advance clears it.
// Errors are ignored: the reason is already in the log.
func (l *lane) store(text string) {
	stored := bounds.ErrorText(errors.New(text))
	l.troubled = true
	l.storeTrouble(&stored)
}

// storeTrouble writes a trouble to the position, or removes it (nil).
func (l *lane) storeTrouble(text *string) {
	ctx, cancel := l.engine.bounded(l.ctx)
	defer cancel()
	pos := l.work.pos
	_, _ = l.engine.pool.Exec(ctx, l.engine.sql[troubleSQL], l.engine.cfg.Group, pos.topic, pos.partition, pos.epoch, text)
}

// hook calls a callback of the configuration in a separate goroutine: a callback that panics or calls
// runtime.Goexit must not end the process, and one that does not return costs HandlerTimeout once:
// until it returns, no hook is called. A stop waits for it for a second.
func (l *lane) hook(call func()) { l.engine.hook(l.stopping, call) }

// hook reports whether it was called.
func (e *engine) hook(stopping <-chan struct{}, call func()) bool {
	if e.hooked.Load() > 0 {
		return false
	}
	result, done := errGoexit, make(chan struct{})
	go func() {
		defer close(done)
		result = guard(func() error { call(); return nil })
	}()
	limit := time.NewTimer(e.cfg.HandlerTimeout)
	defer limit.Stop()
	for waits := true; waits; {
		select {
		case <-done:
			if result != nil {
				e.cfg.Logger.Error("a hook failed", "group", e.cfg.Group, "error", result)
			}
			return true
		case <-stopping:
			stopping = nil
			limit.Reset(min(commitGrace, e.cfg.HandlerTimeout))
		case <-limit.C:
			waits = false
		}
	}
	e.cfg.Logger.Error("a hook did not return in time; no hook is called until it does", "group", e.cfg.Group)
	e.hooked.Add(1)
	e.countAbandoned(done, func() { e.hooked.Add(-1) })
	return true
}

// tell reports what a transaction committed to the hooks. It also logs messages that were parked
// for another reason than a failure; failures are already in the log.
func (l *lane) tell(w *work, out outcome) {
	hooks, last := &l.engine.cfg.Hooks, w.msgs[len(w.msgs)-1]
	if hooks.Processed != nil {
		processed := Processed{
			Topic: w.pos.topic, Partition: w.pos.partition, Fresh: out.fresh, Duplicates: out.duplicates, Parked: len(out.parked), Conflicts: out.conflicts,
			Retried: w.released(), Next: last.next(), Time: last.Time, Claim: out.claim, Handle: out.handle, Commit: out.commit,
		}
		l.hook(func() { hooks.Processed(processed) })
	}
	l.sayPlain(w.msgs)
	if out.conflicts > 0 {
		l.warn("messages are dropped whose ID another message has: Config.OnConflict", errConflict, "messages", out.conflicts, "up_to_offset", last.Offset)
	}
	for _, p := range out.parked {
		if hooks.Parked != nil {
			l.hook(func() { hooks.Parked(p) })
		}
		switch p.Reason {
		case reasonExpired, reasonConflict, reasonInvalid, reasonTooLarge:
			l.warn(`messages are parked without being run: see "outbox-relay parked list"`, p.Err,
				"reason", p.Reason, "offset", p.Message.Offset, "id", p.Message.ID)
		}
	}
}
