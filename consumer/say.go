package consumer

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/effectonce/effectonce/internal/bounds"
)

// warn logs a problem when it begins, then at most every 30 s with a count. One that blocks, keeping
// messages from being handled, ends with the next committed transaction: see works.
func (l *lane) warn(text string, blocks bool, err error, attrs ...any) {
	if times, due := l.p.said.Due(text, blocks); due {
		l.log(slog.LevelWarn, text, append([]any{"error", err, "times", times}, attrs...)...)
	}
	if blocks && !slices.Contains(l.problems, text) {
		l.problems = append(l.problems, text)
	}
}

// works logs that messages are handled again.
func (l *lane) works() {
	for _, text := range l.problems {
		l.ended(text)
	}
	l.problems = nil
}

func (l *lane) ended(text string) {
	if ended, ok := l.p.said.End(text); ok {
		l.log(slog.LevelInfo, "partition works again", "after", text, "times", ended.Times, "lasted", ended.Lasted)
	}
}

// log writes a line about the lane's partition.
func (l *lane) log(level slog.Level, text string, attrs ...any) {
	for i, attr := range attrs {
		if d, ok := attr.(time.Duration); ok {
			attrs[i] = readable(d)
		}
	}
	l.p.consumer.cfg.Logger.Log(l.p.ctx, level, text, append([]any{
		"group", l.p.consumer.cfg.Group, "topic", l.p.pos.topic, "partition", l.p.pos.partition,
	}, attrs...)...)
}

// report logs what happened to a message.
func (l *lane) report(msg *Message, text string, err error, attrs ...any) {
	l.log(slog.LevelError, text, append([]any{"offset", msg.Offset, "id", msg.ID, "error", err}, attrs...)...)
}

// note records, in the status, that a message is tried again or blocks.
func (l *lane) note(msg *Message, state PartitionState, err error) {
	msg.noted = true
	l.p.note(msg, laneState{state, err})
}

// block records, in the log, in the status and in the database, that a message blocks its partition,
// its key, or only itself, by Config.Order.
func (l *lane) block(msg *Message, state PartitionState, why *parking, text string, n next) next {
	l.note(msg, state, why.err)
	msg.blocks = text
	if times, due := l.p.said.Due(text, true); due {
		l.log(slog.LevelError, text, "error", why.err, "times", times, "offset", msg.Offset, "id", msg.ID, "attempts", why.attempts, "reason", why.reason, "retry_in", n.wait)
	}
	l.store(fmt.Sprintf("%s: offset %d, message %s, attempt %d: %v", text, msg.Offset, msg.ID, why.attempts, why.err))
	l.troubled = false // until the message is done
	return n
}

// unblock ends that.
func (l *lane) unblock(msg *Message) {
	if msg.noted {
		l.p.note(msg, laneState{state: StateRunning})
	}
	if msg.blocks != "" {
		l.ended(msg.blocks)
		l.troubled = true // stored by the lane that had the message then
	}
	msg.noted, msg.blocks = false, ""
}

// store writes to the position why the partition does not continue, until the lane's next transaction.
// Errors are ignored: the reason is already in the log.
func (l *lane) store(text string) {
	stored := bounds.ErrorText(errors.New(text))
	l.troubled = true
	l.storeTrouble(&stored)
}

// clearTrouble removes the reason that store wrote.
func (l *lane) clearTrouble() {
	if l.troubled {
		l.storeTrouble(nil)
	}
	l.troubled = false
}

// storeTrouble writes a trouble to the position, or removes it (nil).
func (l *lane) storeTrouble(text *string) {
	ctx, cancel := l.p.consumer.bounded(l.p.ctx)
	defer cancel()
	pos := l.p.pos
	_, _ = l.p.consumer.pool.Exec(ctx, l.p.consumer.sql[troubleSQL], l.p.consumer.cfg.Group, pos.topic, pos.partition, pos.epoch, text)
}

// hook calls a callback of the configuration in a separate goroutine: a callback that panics or calls
// runtime.Goexit must not end the process, and one that does not return costs HandlerTimeout once:
// until it returns, no hook is called. A stop waits for it for a second.
func (l *lane) hook(call func()) { l.p.consumer.hook(l.p.stopping, call) }

// hook reports whether it was called.
func (c *Consumer) hook(stopping <-chan struct{}, call func()) bool {
	if c.hooked.Load() > 0 {
		return false
	}
	result, done := errGoexit, make(chan struct{})
	go func() {
		defer close(done)
		result = guard(func() error { call(); return nil })
	}()
	limit := time.NewTimer(c.cfg.HandlerTimeout)
	defer limit.Stop()
	for waits := true; waits; {
		select {
		case <-done:
			if result != nil {
				c.cfg.Logger.Error("a hook failed", "group", c.cfg.Group, "error", result)
			}
			return true
		case <-stopping:
			stopping = nil
			limit.Reset(min(commitGrace, c.cfg.HandlerTimeout))
		case <-limit.C:
			waits = false
		}
	}
	c.cfg.Logger.Error("a hook did not return in time; no hook is called until it does", "group", c.cfg.Group)
	c.hooked.Add(1)
	c.countAbandoned(done, func() { c.hooked.Add(-1) })
	return true
}

// tell reports what a transaction committed to the hooks. It also logs messages that were parked
// for another reason than a failure; failures are already in the log.
func (l *lane) tell(w *work, out outcome) {
	hooks, last, plain := &l.p.consumer.cfg.Hooks, w.msgs[len(w.msgs)-1], 0
	for _, msg := range w.msgs {
		if msg.plain && msg.row == 0 {
			plain++
		}
	}
	if hooks.Processed != nil {
		processed := Processed{
			Topic: w.pos.topic, Partition: w.pos.partition, Fresh: out.fresh, Duplicates: out.duplicates, Parked: len(out.parked), Conflicts: out.conflicts, WithoutID: plain,
			Retried: w.released(), Next: last.next(), Time: last.Time, Claim: out.claim, Handle: out.handle, Commit: out.commit,
		}
		l.hook(func() { hooks.Processed(processed) })
	}
	if plain > 0 {
		l.p.consumer.warnPlain.Do(func() {
			l.log(slog.LevelWarn, "messages without an ID are identified by topic, partition and offset: a duplicate that their producer sends is not recognised; logged once", "up_to_offset", last.Offset)
		})
	}
	if out.conflicts > 0 {
		l.warn("messages are dropped whose ID another message has: Config.OnConflict", false, errConflict, "messages", out.conflicts, "up_to_offset", last.Offset)
	}
	for _, p := range out.parked {
		if hooks.Parked != nil {
			l.hook(func() { hooks.Parked(p) })
		}
		switch p.Reason {
		case reasonExpired, reasonConflict, reasonInvalid, reasonTooLarge:
			l.warn(`messages are parked without being run: see "outbox-relay parked list"`, false, p.Err,
				"reason", p.Reason, "offset", p.Message.Offset, "id", p.Message.ID)
		}
	}
}
