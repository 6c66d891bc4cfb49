package relay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// deadLook polls dead rows concurrently with the worker of the shard, so that the rows of other
// topics do not wait for it, however many dead rows there are. It knows which topics have dead
// rows, hands back rows whose topic now exists or was resumed, and reports when rows may leave. The
// worker publishes those, and only the worker adds dead rows.
type deadLook struct {
	*publisher
	worked chan struct{} // the worker has published all releasable rows

	mu       sync.Mutex
	withDead map[string]bool // topics that may have dead rows; replaced, never changed
	moves    int             // how often rows became dead
	found    bool            // something may leave

	// Used only by the goroutine that polls.
	seen      int        // moves
	wasPaused *pausedSet // at the last check of topics
	handing   bool       // more rows of a topic follow when the worker has published these
	ready     []ready    // waits that are over: their rows are handed back batch by batch
	due       time.Time
	rest      time.Duration // between two checks of topics
	skipFreed bool          // see Config.SkipDead
}

// ready is a topic whose rows no longer need to wait for a reason, and the last row that was handed
// back.
type ready struct {
	topic  string
	reason Reason
	after  int64
}

const (
	// deadEvery is how often the relay checks whether an operator released rows.
	deadEvery = time.Second
	// waitEvery is how often it checks topics, at least; after a change it is deadEvery at first.
	waitEvery = 5 * time.Second
	// lookShare: after a poll that takes long, because of the rows that an old snapshot keeps, the
	// pause is this many times its duration.
	lookShare = 20
	// handBackMax bounds the rows of a topic that are handed back at once. The worker publishes
	// them before the next batch.
	handBackMax = 5000
)

func newDeadLook(p *publisher) *deadLook {
	return &deadLook{publisher: p, worked: make(chan struct{}, 1), rest: deadEvery}
}

// ask and learn have limits of their own. The worker's ask and learn would count as signs of life,
// which these polls are not.
func (l *deadLook) ask(ctx context.Context, read func(pgx.Rows) error, sql string, args ...any) error {
	ctx, cancel := context.WithTimeoutCause(ctx, l.patience, errNoAnswer)
	defer cancel()
	return l.askNow(ctx, read, sql, args...)
}

func (l *deadLook) learn(ctx context.Context, names []string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, l.cfg.patience(), errSilentBrokers)
	defer cancel()
	return l.learnNow(ctx, names)
}

// begin reads which topics have dead rows. The previous holder adds none any more.
func (l *deadLook) begin(ctx context.Context) error {
	if err := l.readTopics(ctx); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.found = len(l.withDead) > 0
	return nil
}

// poll polls until ctx ends. If more rows are ready, it polls again as soon as the worker has
// published the last ones. A poll that fails does not end the work on the shard: rows that are not dead
// need no poll.
func (l *deadLook) poll(ctx context.Context) error {
	for rest := time.Duration(0); ; {
		timer := time.NewTimer(rest)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C:
		case <-l.worked:
			timer.Stop()
			if !l.handing {
				continue
			}
		}
		took, err := l.round(ctx)
		rest = max(deadEvery, lookShare*took)
		switch {
		case err == nil || ctx.Err() != nil:
		case errors.Is(err, errAnotherRun):
			return err
		default:
			l.say.warn(ctx, "dead rows could not be polled; the relay retries", "relay", l.cfg.Name, "error", err)
			rest = waitEvery
		}
	}
}

// now is run for a relay that ends when no row waits: one round, in the worker.
func (l *deadLook) now(ctx context.Context) error {
	if !l.handing && time.Now().Before(l.due) {
		return nil
	}
	_, err := l.round(ctx)
	l.due = time.Now().Add(deadEvery)
	return err
}

// round polls once, and returns how long the query for rows that may leave took.
func (l *deadLook) round(ctx context.Context) (took time.Duration, err error) {
	if len(l.topicsNow()) == 0 {
		return 0, nil
	}
	if l.cfg.SkipDead && !l.skipFreed {
		if err := l.freeSkipped(ctx); err != nil {
			return 0, err
		}
		l.skipFreed = true
	}
	if l.handing || l.changed() || !time.Now().Before(l.due) {
		if err := l.lookForTopics(ctx); err != nil {
			return 0, err
		}
	}
	begun, found := time.Now(), false
	err = l.ask(ctx, func(rows pgx.Rows) error {
		found, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool])
		return err
	}, l.sql.released, l.cfg.Name, l.lease.shards, l.lease.shard, l.cfg.SkipDead)
	if found {
		l.mu.Lock()
		l.found = true
		l.mu.Unlock()
	}
	return time.Since(begun), err
}

// changed reports whether rows became dead, or a topic was paused or resumed, since the last check
// of topics.
func (l *deadLook) changed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	paused := l.lease.obeys.set.Load()
	if l.moves == l.seen && paused == l.wasPaused {
		return false
	}
	l.seen, l.wasPaused, l.rest = l.moves, paused, deadEvery
	return true
}

// lookForTopics hands back a batch of rows whose topic now exists, or is no longer paused.
func (l *deadLook) lookForTopics(ctx context.Context) error {
	if !l.handing {
		l.due = time.Now().Add(l.rest)
		l.rest = min(2*l.rest, waitEvery)
		if err := l.readTopics(ctx); err != nil {
			return err
		}
		if err := l.lookForReady(ctx); err != nil {
			return err
		}
	}
	l.handing = false
	for i := 0; i < len(l.ready); {
		if l.isPaused(l.ready[i].topic) { // paused again: its remaining rows wait
			i++
			continue
		}
		n, err := l.handBack(ctx, &l.ready[i])
		if err != nil {
			return err
		}
		if n == handBackMax {
			l.handing = true
			return nil
		}
		l.ready, l.rest, l.due = slices.Delete(l.ready, i, i+1), deadEvery, time.Time{}
	}
	return nil
}

// isPaused reports whether the worker lets the rows of a topic wait.
func (l *deadLook) isPaused(topic string) bool { return l.lease.obeys.set.Load().has(topic) }

// readTopics reads which topics have dead rows. It discards the result if more rows became dead
// during the statement, which may not have seen those.
func (l *deadLook) readTopics(ctx context.Context) error {
	l.mu.Lock()
	moves := l.moves
	l.mu.Unlock()
	topics, name := map[string]bool{}, ""
	err := l.ask(ctx, func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, []any{&name}, func() error { topics[name] = true; return nil })
		return err
	}, l.sql.deadTopics, l.cfg.Name)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.moves == moves {
		l.withDead = topics
	}
	return nil
}

// lookForReady finds topics that rows waited for and that are ready now.
func (l *deadLook) lookForReady(ctx context.Context) error {
	var waits []ready
	var w ready
	err := l.ask(ctx, func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, []any{&w.topic, &w.reason}, func() error { waits = append(waits, w); return nil })
		return err
	}, l.sql.waitingTopics, l.cfg.Name)
	if err != nil {
		return err
	}
	var missing []string
	for _, w := range waits {
		switch {
		case l.isPaused(w.topic):
		case w.reason == ReasonPaused:
			l.isReady(w)
		case !slices.Contains(missing, w.topic):
			missing = append(missing, w.topic)
		}
	}
	return l.lookForMissing(ctx, missing, waits)
}

// lookForMissing queries Kafka for topics that rows wait for.
func (l *deadLook) lookForMissing(ctx context.Context, missing []string, waits []ready) error {
	var names []string
	for _, topic := range missing {
		names = append(names, l.topics.waitingFor(topic)...)
	}
	if len(names) > 0 {
		if err := l.learn(ctx, names); err != nil {
			return err
		}
	}
	for _, topic := range missing {
		if !l.topics.released(topic, l.topics.waitingFor(topic)) {
			continue
		}
		for _, w := range waits {
			if w.topic == topic && w.reason != ReasonPaused {
				l.isReady(w)
			}
		}
	}
	return nil
}

// isReady notes that rows no longer need to wait.
func (l *deadLook) isReady(w ready) {
	if !slices.ContainsFunc(l.ready, func(r ready) bool { return r.topic == w.topic && r.reason == w.reason }) {
		l.ready = append(l.ready, w)
	}
}

// handBack hands back the next rows of a topic.
func (l *deadLook) handBack(ctx context.Context, r *ready) (rows int, err error) {
	err = l.ask(ctx, func(result pgx.Rows) error {
		if !result.Next() {
			return result.Err()
		}
		return result.Scan(&rows, &r.after)
	}, l.sql.retryTopic, l.cfg.Name, r.topic, r.reason, r.after, handBackMax, l.lease.shards, l.lease.shard)
	return rows, err
}

func (l *deadLook) freeSkipped(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, l.patience, errNoAnswer)
	defer cancel()
	if _, err := l.pool.Exec(ctx, l.sql.freeSkipped, l.cfg.Name, l.lease.shards, l.lease.shard); err != nil {
		return fmt.Errorf("free the keys of dead rows that hold no other row: %w", silence(ctx, err))
	}
	return nil
}

// topicsNow returns the topics that may have dead rows. The worker relies on it: a topic is missing
// only if no row of it is dead.
func (l *deadLook) topicsNow() map[string]bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.withDead
}

// moved is called by the worker when rows are in outbox_dead, before it reads the next page.
func (l *deadLook) moved(rows []deadRow) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.moves++
	dead := maps.Clone(l.withDead)
	for _, r := range rows {
		dead[r.row.topic] = true
	}
	l.withDead = dead
}

// takeFound reports whether rows may leave.
func (l *deadLook) takeFound() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	found := l.found
	l.found = false
	return found
}

// taken is called when, as far as the worker knows, no more rows may leave.
func (l *deadLook) taken() {
	select {
	case l.worked <- struct{}{}:
	default:
	}
}
