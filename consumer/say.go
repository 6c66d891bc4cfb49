package consumer

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/effectonce/effectonce/internal/bounds"
)

// repeatEvery is how often a problem that lasts is logged after the first time.
const repeatEvery = 30 * time.Second

// repeated logs problems that last: each once, then at most every 30 s with how often it came. The end of what keeps
// messages from being handled is logged, too.
type repeated struct {
	mu       sync.Mutex
	problems map[string]*problem // by their text
}

// problem is one that lasts. One that did not come for a while is over.
type problem struct {
	since, logged, seen time.Time
	count               int
	blocks              bool // no message is handled meanwhile
}

// warn logs a problem beside which messages are handled.
func (r *repeated) warn(l *lane, text string, err error, attrs ...any) {
	r.note(l, slog.LevelWarn, text, false, append([]any{"error", err}, attrs...))
}

// blocks logs a problem that the next transaction that commits ends.
func (r *repeated) blocks(l *lane, level slog.Level, text string, err error, attrs ...any) {
	r.note(l, level, text, true, append([]any{"error", err}, attrs...))
}

func (r *repeated) note(l *lane, level slog.Level, text string, blocks bool, attrs []any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	p := r.problems[text]
	if p == nil || !p.blocks && now.Sub(p.seen) > 2*repeatEvery {
		p = &problem{since: now, blocks: blocks}
		if r.problems == nil {
			r.problems = map[string]*problem{}
		}
		r.problems[text] = p
	}
	p.seen = now
	p.count++
	if p.count > 1 && now.Sub(p.logged) < repeatEvery {
		return
	}
	p.logged = now
	l.log(level, text, append(attrs, "times", p.count)...)
}

// end says that messages are handled again.
func (r *repeated) end(l *lane) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for text, p := range r.problems {
		if !p.blocks {
			continue
		}
		delete(r.problems, text)
		l.log(slog.LevelInfo, "partition works again", "after", text, "times", p.count, "lasted", time.Since(p.since).Round(time.Millisecond))
	}
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

// blocked says, in the log and in the database, that a message keeps its partition from going on.
func (l *lane) blocked(msg *Message, why *parking, text string, wait time.Duration) {
	l.said.blocks(l, slog.LevelError, text, why.err, "offset", msg.Offset, "id", msg.ID, "attempts", why.attempts, "reason", why.reason, "retry_in", wait)
	l.store(fmt.Sprintf("%s: offset %d, message %s, attempt %d: %v", text, msg.Offset, msg.ID, why.attempts, why.err))
}

// store keeps why the partition does not go on in its position. The next advance takes it back. The log said it
// already, so a database that is away costs nothing.
func (l *lane) store(text string) {
	ctx, cancel := l.engine.bounded(l.ctx)
	defer cancel()
	pos := l.work.pos
	_, _ = l.engine.pool.Exec(ctx, l.engine.sql.trouble, l.engine.cfg.Group, pos.topic, pos.partition, pos.epoch, bounds.ErrorText(errors.New(text)))
}

// hook calls a callback of the configuration, in a goroutine of its own: a panic in it, runtime.Goexit or one that never
// returns must not end the process or the partition. It reports whether the callback returned.
func (e *engine) hook(call func()) bool {
	result, done := errHookGoexit, make(chan struct{})
	go func() {
		defer close(done)
		result = guard(func() error { call(); return nil })
	}()
	limit := time.NewTimer(e.cfg.HandlerTimeout)
	defer limit.Stop()
	select {
	case <-done:
		if result != nil {
			e.cfg.Logger.Error("a hook failed", "group", e.cfg.Group, "error", result)
		}
		return true
	case <-limit.C:
		e.countAbandoned(done)
		e.cfg.Logger.Error("a hook did not return within HandlerTimeout and is left behind", "group", e.cfg.Group)
		return false
	}
}

// tell passes on what a transaction committed: to the hooks, and what is parked for another reason than a failure,
// which the log has already, to the log.
func (l *lane) tell(w *work, out outcome) {
	hooks, last := &l.engine.cfg.Hooks, w.msgs[len(w.msgs)-1]
	if hooks.Processed != nil {
		processed := Processed{
			Topic: w.pos.topic, Partition: w.pos.partition, Fresh: out.fresh, Duplicates: out.duplicates, Parked: len(out.parked),
			Retried: w.released(), Next: last.next(), Time: last.Time, Claim: out.claim, Handle: out.handle, Commit: out.commit,
		}
		l.engine.hook(func() { hooks.Processed(processed) })
	}
	for _, p := range out.parked {
		if hooks.Parked != nil {
			l.engine.hook(func() { hooks.Parked(p) })
		}
		switch p.Reason {
		case reasonExpired, reasonConflict, reasonInvalid, reasonTooLarge:
			l.saidParked.warn(l, `messages are parked without being run: see "outbox-relay parked list"`, p.Err,
				"reason", p.Reason, "offset", p.Message.Offset, "id", p.Message.ID)
		}
	}
}
