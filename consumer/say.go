package consumer

import (
	"cmp"
	"errors"
	"log/slog"
	"time"

	"github.com/effectonce/effectonce/internal/bounds"
)

// trouble is why a lane, a message or the partition does not run, or what is tried again: in the
// status for as long as it lasts, in the log if it has a text, and in the database if it is stored.
type trouble struct {
	state  PartitionState
	err    error
	text   string // of the log; empty: as before
	stored string // in the position, where operators see it; empty: as before
}

// suffers records the trouble of a lane or a message, and logs it: when it begins, then at most every
// 30 s with a count.
func (p *partition) suffers(who any, level slog.Level, t trouble, attrs ...any) {
	if times, due := p.said.Due(t.text, true); due {
		p.log(level, t.text, append([]any{"error", t.err, "times", times}, attrs...)...)
	}
	p.record(who, &t)
}

// works ends the troubles of the lane and of messages. It is called after each commit: where nothing
// is troubled it takes no lock.
func (l *lane) works(msgs ...*Message) {
	if l.p.troubled.Load() {
		l.p.record(l, nil)
		for _, msg := range msgs {
			l.p.record(msg, nil)
		}
	}
}

// record replaces the trouble of a lane, of a message, or of the partition if it is paused; nil: it has
// none. The state of the partition is the worst of all.
func (p *partition) record(who any, now *trouble) {
	p.noting.Lock()
	before, troubled := p.troubles[who]
	if now == nil && !troubled {
		p.noting.Unlock()
		return
	}
	if delete(p.troubles, who); now != nil {
		p.troubles[who] = trouble{now.state, now.err, cmp.Or(now.text, before.text), cmp.Or(now.stored, before.stored)}
	}
	worst, stored, over := trouble{state: StateRunning}, "", before.text
	for _, t := range p.troubles {
		if t.state.severity() > worst.state.severity() || t.state == worst.state && worst.err == nil {
			worst = t
		}
		if t.stored != "" && (stored == "" || t.stored == p.stored) {
			stored = t.stored
		}
		if t.text == over {
			over = "" // it lasts
		}
	}
	p.does.become(worst.state, worst.err)
	p.troubled.Store(len(p.troubles) > 0)
	changed := p.stored != stored
	p.stored = stored
	p.noting.Unlock()
	if ended, ok := p.said.End(over); ok && now == nil {
		p.log(slog.LevelInfo, "partition works again", "after", over, "times", ended.Times, "lasted", ended.Lasted)
	}
	if changed {
		p.store()
	}
}

// store writes to the position why the partition does not continue, or removes it. Errors are ignored:
// the reason is already in the log.
func (p *partition) store() {
	p.storing.Lock() // the last one writes what is stored last
	defer p.storing.Unlock()
	p.noting.Lock()
	var text *string
	if p.stored != "" {
		bounded := bounds.ErrorText(errors.New(p.stored))
		text = &bounded
	}
	p.noting.Unlock()
	ctx, cancel := p.consumer.bounded(p.ctx)
	defer cancel()
	_, _ = p.consumer.pool.Exec(ctx, p.consumer.sql[troubleSQL], p.consumer.cfg.Group, p.pos.topic, p.pos.partition, p.pos.epoch, text)
}

// warn logs what may repeat, at most every 30 s with a count.
func (p *partition) warn(text string, err error, attrs ...any) {
	if times, due := p.said.Due(text, false); due {
		p.log(slog.LevelWarn, text, append([]any{"error", err, "times", times}, attrs...)...)
	}
}

// report logs what happened to a message.
func (p *partition) report(msg *Message, text string, err error, attrs ...any) {
	p.log(slog.LevelError, text, append([]any{"offset", msg.Offset, "id", msg.ID, "error", err}, attrs...)...)
}

// reportParking logs why a message is parked, stays parked, or becomes a dead letter.
func (p *partition) reportParking(msg *Message, why *parking) {
	text := "message cannot be handled and is parked"
	if why.retry {
		text = "message failed and waits in parked_messages for its next attempt"
	} else if p.consumer.becomesLetter(why) {
		text = "message cannot be handled and is sent to the dead letter topic"
	}
	p.report(msg, text, why.err, "attempts", why.attempts, "reason", why.reason, "retry_in", why.wait)
}

// log writes a line about the partition.
func (p *partition) log(level slog.Level, text string, attrs ...any) {
	for i, attr := range attrs {
		if d, ok := attr.(time.Duration); ok {
			attrs[i] = readable(d)
		}
	}
	p.consumer.cfg.Logger.Log(p.ctx, level, text, append([]any{
		"group", p.consumer.cfg.Group, "topic", p.pos.topic, "partition", p.pos.partition,
	}, attrs...)...)
}

// hookMax bounds a call of a hook.
const hookMax = 5 * time.Second

// hook calls a callback of the configuration in a separate goroutine: a callback that panics or calls
// runtime.Goexit must not end the process, and one that does not return costs hookMax once: until it
// returns, no hook is called.
func (p *partition) hook(call func()) {
	c := p.consumer
	if c.hooked.Load() > 0 {
		return
	}
	result, done := errGoexit, make(chan struct{})
	go func() {
		defer close(done)
		result = guard(func() error { call(); return nil })
	}()
	limit := time.NewTimer(hookMax)
	defer limit.Stop()
	select {
	case <-done:
		if result != nil {
			c.cfg.Logger.Error("a hook failed", "group", c.cfg.Group, "error", result)
		}
	case <-limit.C:
		c.cfg.Logger.Error("a hook did not return in time; no hook is called until it does", "group", c.cfg.Group)
		count(&c.hooked, done)
	}
}

// tell reports what a transaction committed to the hooks. It also logs messages that were parked
// for another reason than a failure; failures are already in the log.
func (p *partition) tell(w *work, out outcome) {
	hooks, last, plain := &p.consumer.cfg.Hooks, w.msgs[len(w.msgs)-1], 0
	for _, msg := range w.msgs {
		if msg.plain && msg.row == 0 {
			plain++
		}
	}
	if hooks.Processed != nil {
		processed := Processed{
			Topic: w.pos.topic, Partition: w.pos.partition, Fresh: out.fresh, Duplicates: out.duplicates, Parked: len(out.parked), Conflicts: out.conflicts, WithoutID: plain,
			Retried: w.released(), Next: last.Offset + 1, Time: last.Time, Claim: out.claim, Handle: out.handle, Commit: out.commit,
		}
		p.hook(func() { hooks.Processed(processed) })
	}
	if plain > 0 {
		p.consumer.warnPlain.Do(func() {
			p.log(slog.LevelWarn, "messages without an ID are identified by topic, partition and offset: a duplicate that their producer sends is not recognised; logged once", "up_to_offset", last.Offset)
		})
	}
	if out.conflicts > 0 {
		p.warn("messages are dropped whose ID another message has: Config.OnConflict", errConflict, "messages", out.conflicts, "up_to_offset", last.Offset)
	}
	for _, parked := range out.parked {
		if hooks.Parked != nil {
			p.hook(func() { hooks.Parked(parked) })
		}
		switch parked.Reason {
		case reasonExpired, reasonConflict, reasonInvalid, reasonTooLarge:
			p.warn(`messages are parked without being run: see "outbox-relay parked list"`, parked.Err,
				"reason", parked.Reason, "offset", parked.Message.Offset, "id", parked.Message.ID)
		}
	}
}
