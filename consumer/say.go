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

// repeated logs a problem that lasts once, then at most every 30 s with how often it came. Its end is logged, too.
type repeated struct {
	mu    sync.Mutex
	text  string
	since time.Time
	last  time.Time
	count int
}

func (r *repeated) warn(l *lane, text string, err error, attrs ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.text != text {
		r.text, r.since, r.last, r.count = text, time.Now(), time.Time{}, 0
	}
	r.count++
	if !r.last.IsZero() && time.Since(r.last) < repeatEvery {
		return
	}
	r.last = time.Now()
	l.log(slog.LevelWarn, text, append([]any{"error", err, "times", r.count}, attrs...)...)
}

// end says that what lasted is over.
func (r *repeated) end(l *lane) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.text == "" {
		return
	}
	l.log(slog.LevelInfo, "partition works again", "after", r.text, "times", r.count, "lasted", time.Since(r.since).Round(time.Millisecond))
	r.text = ""
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
	l.report(msg, text, why.err, "attempts", why.attempts, "reason", why.reason, "retry_in", wait)
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

// hook calls a callback of the configuration. A panic in it is logged: it must not end the process or the partition.
func (e *engine) hook(call func()) {
	if err := guard(func() error { call(); return nil }); err != nil {
		e.cfg.Logger.Error("a hook panicked", "group", e.cfg.Group, "error", err)
	}
}

// tell passes on what a transaction committed: to the hooks, and what is parked for another reason than a failure,
// which the log has already, to the log.
func (l *lane) tell(w *work, out outcome) {
	hooks, last := &l.engine.cfg.Hooks, w.msgs[len(w.msgs)-1]
	if hooks.Processed != nil {
		l.engine.hook(func() {
			hooks.Processed(Processed{
				Topic: w.pos.topic, Partition: w.pos.partition, Fresh: out.fresh, Duplicates: out.duplicates, Parked: len(out.parked),
				Retried: w.released(), Next: last.next(), Time: last.Time, Claim: out.claim, Handle: out.handle, Commit: out.commit,
			})
		})
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
