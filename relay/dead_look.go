package relay

import (
	"context"
	"errors"
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
	looked    bool       // for topics
	due       time.Time
	rest      time.Duration // between two checks of topics
	skipped   bool          // see Config.SkipDead
}

// wait is a topic that rows wait for, and why: name is the one in Kafka.
type wait struct {
	topic  string
	reason Reason
	name   string
}

const (
	// deadEvery is how often the relay checks whether an operator released rows.
	deadEvery = time.Second
	// waitEvery is how often it checks topics, at least; after a change it is deadEvery at first.
	waitEvery = 5 * time.Second
	// lookShare: after a poll that takes long, because of the rows that an old snapshot keeps, the
	// pause is this many times its duration.
	lookShare = 20
	// handBackMax bounds the rows that are handed back at once. The worker publishes them before the
	// next batch.
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

// begin reads which topics have dead rows, and the last of them. The previous holder adds none any
// more.
func (l *deadLook) begin(ctx context.Context) error {
	if err := l.readTopics(ctx); err != nil {
		return err
	}
	err := l.ask(ctx, func(rows pgx.Rows) (err error) {
		l.dead.last, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[int64])
		return err
	}, l.sql.of(lastDeadSQL), l.cfg.Name)
	if err != nil {
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
	if l.cfg.SkipDead && !l.skipped {
		if err := l.change(ctx, l.ask, l.sql.of(skipDeadSQL()), l.lease.shards); err != nil {
			return 0, err
		}
		l.skipped = true
	}
	if l.handing || l.changed() || !time.Now().Before(l.due) {
		if err := l.handBack(ctx); err != nil {
			return 0, err
		}
	}
	begun, found := time.Now(), false
	err = l.ask(ctx, func(rows pgx.Rows) error {
		found, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool])
		return err
	}, l.sql.of(releasedSQL), l.cfg.Name, l.lease.shards, l.lease.shard, l.cfg.SkipDead)
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

// handBack hands back a batch of rows whose topic now exists, or is no longer paused.
func (l *deadLook) handBack(ctx context.Context) error {
	if !l.handing {
		l.due = time.Now().Add(l.rest)
		l.rest = min(2*l.rest, waitEvery)
	}
	if err := l.readTopics(ctx); err != nil {
		return err
	}
	ready, err := l.ready(ctx)
	if err != nil {
		return err
	}
	left := handBackMax
	for i := 0; i < len(ready) && left > 0; i++ {
		w, n := ready[i], 0
		err := l.ask(ctx, func(rows pgx.Rows) (err error) {
			n, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[int])
			return err
		}, l.sql.of(retryTopicSQL), l.cfg.Name, w.topic, w.reason, w.name, left, l.lease.shards, l.lease.shard)
		if err != nil {
			return err
		}
		if left -= n; n > 0 {
			l.rest, l.due = deadEvery, time.Time{}
		}
	}
	l.handing, l.looked = left == 0, l.looked || left > 0
	return nil
}

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
	}, l.sql.of(deadTopicsSQL), l.cfg.Name)
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

// ready returns the waits that are over. Where another topic in Kafka is chosen now, the rows do not wait
// for the one that they waited for; what Config.Topic chooses is not known before it is asked.
func (l *deadLook) ready(ctx context.Context) (over []wait, err error) {
	var waits []wait
	err = l.ask(ctx, func(rows pgx.Rows) (err error) {
		waits, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (w wait, err error) { return w, row.Scan(&w.topic, &w.reason, &w.name) })
		return err
	}, l.sql.of(waitingTopicsSQL), l.cfg.Name)
	if err != nil {
		return nil, err
	}
	paused, first := l.lease.obeys.set.Load(), !l.looked
	var missing []string
	for _, w := range waits {
		switch {
		case paused.has(w.topic):
		case w.reason == ReasonPaused, l.cfg.Sink != nil, l.cfg.Topic != nil && first, l.cfg.Topic == nil && w.name != l.cfg.TopicPrefix+w.topic:
			over = append(over, w)
		default:
			missing = append(missing, w.name)
		}
	}
	if len(missing) > 0 {
		if err := l.learn(ctx, missing); err != nil {
			return nil, err
		}
	}
	for _, w := range waits {
		if s, ok := l.topics.get(w.name); ok && s.reason == "" && slices.Contains(missing, w.name) && !paused.has(w.topic) && !slices.Contains(over, w) {
			over = append(over, w)
		}
	}
	return over, nil
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
