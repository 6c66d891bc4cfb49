package relay

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/pause"
)

// deadLook polls dead rows concurrently with the worker of the shard, so that the rows of other
// topics do not wait for it, however many dead rows there are. It knows which topics have dead
// rows, hands back rows whose topic now exists or was resumed, and reports when rows may leave. The
// worker publishes those, and only the worker adds dead rows.
type deadLook struct {
	*publisher
	found  atomic.Bool  // something may leave
	looked bool         // for topics; used only by the goroutine that polls
	rounds atomic.Int64 // since rows became dead, or topics were paused, resumed or created

	mu       sync.Mutex
	withDead map[string]bool // topics that may have dead rows; replaced, never changed
	moves    int             // how often rows became dead
}

// wait is a topic that rows wait for, and why: name is the one in Kafka.
type wait struct {
	topic  string
	reason Reason
	name   string
}

const (
	// deadEvery is how often the relay checks whether rows may leave.
	deadEvery = time.Second
	// topicRounds: after this many rounds without a change, one round of as many checks topics.
	topicRounds = 5
	// lookShare: after a poll that takes long, because of the rows that an old snapshot keeps, the
	// pause is this many times its duration.
	lookShare = 20
	// handBackMax bounds the rows of a topic that one statement hands back.
	handBackMax = 5000
)

// begin reads which topics have dead rows, and the last of them. The previous holder adds none any
// more.
func (l *deadLook) begin(ctx context.Context) error {
	if err := l.readTopics(ctx); err != nil {
		return err
	}
	if err := l.ask(ctx, one(&l.dead.last), l.sql.of(lastDeadSQL), l.cfg.Name); err != nil {
		return err
	}
	l.found.Store(len(l.topicsNow()) > 0)
	return nil
}

// poll polls until ctx ends. A poll that fails does not end the work on the shard: rows that are not
// dead need no poll.
func (l *deadLook) poll(ctx context.Context) error {
	for rest := time.Duration(0); pause.For(ctx, rest); {
		took, err := l.round(ctx)
		rest = max(deadEvery, lookShare*took)
		if errors.Is(err, errAnotherRun) {
			return err
		}
		if err != nil && ctx.Err() == nil {
			l.say.warn(ctx, "dead rows could not be polled; the relay retries", "relay", l.cfg.Name, "error", err)
		}
	}
	return nil
}

// round polls once, and returns how long the query for rows that may leave took.
func (l *deadLook) round(ctx context.Context) (took time.Duration, err error) {
	if err := l.readTopics(ctx); err != nil || len(l.topicsNow()) == 0 {
		return 0, err
	}
	n := l.rounds.Add(1)
	for more := n <= topicRounds || n%topicRounds == 0; more; {
		if more, err = l.handBack(ctx); err != nil {
			return 0, err
		}
	}
	begun, found := time.Now(), false
	err = l.ask(ctx, one(&found), l.sql.of(releasedSQL), l.cfg.Name, l.lease.shards, l.lease.shard, l.cfg.SkipDead)
	if found {
		l.found.Store(true)
	}
	return time.Since(begun), err
}

// handBack hands back rows whose topic now exists, or is no longer paused: at most handBackMax of each.
// It reports whether there may be more.
func (l *deadLook) handBack(ctx context.Context) (more bool, err error) {
	ready, err := l.ready(ctx)
	for i := 0; i < len(ready) && err == nil; i++ {
		w, n := ready[i], 0
		err = l.ask(ctx, one(&n), l.sql.of(retryTopicSQL), l.cfg.Name, w.topic, w.reason, w.name, handBackMax, l.lease.shards, l.lease.shard)
		if n > 0 {
			l.found.Store(true)
		}
		more = more || n == handBackMax
	}
	l.looked = l.looked || err == nil && !more
	if len(ready) > 0 {
		l.rounds.Store(0)
	}
	return more, err
}

// readTopics reads which topics have dead rows. It discards the result if more rows became dead
// during the statement, which may not have seen those.
func (l *deadLook) readTopics(ctx context.Context) error {
	l.mu.Lock()
	moves := l.moves
	l.mu.Unlock()
	var names []string
	if err := l.ask(ctx, all(&names), l.sql.of(deadTopicsSQL), l.cfg.Name); err != nil {
		return err
	}
	topics := map[string]bool{}
	for _, name := range names {
		topics[name] = true
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
	paused := l.lease.obeys.Load()
	waits = slices.DeleteFunc(waits, func(w wait) bool { return paused.has(w.topic) })
	elsewhere := func(w wait) bool {
		return w.reason == ReasonPaused || l.cfg.Sink != nil || l.cfg.Topic != nil && !l.looked || l.cfg.Topic == nil && w.name != l.cfg.TopicPrefix+w.topic
	}
	var missing []string
	for _, w := range waits {
		if !elsewhere(w) {
			missing = append(missing, w.name)
		}
	}
	if len(missing) > 0 {
		asking, cancel := context.WithTimeoutCause(ctx, l.cfg.patience(), errSilentBrokers) // no sign of life
		defer cancel()
		if err := l.learnNow(asking, missing); err != nil {
			return nil, err
		}
	}
	return slices.DeleteFunc(waits, func(w wait) bool {
		s, ok := l.topics.get(w.name)
		return !elsewhere(w) && (!ok || s.reason != "")
	}), nil
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
	l.rounds.Store(0)
	dead := maps.Clone(l.withDead)
	for _, r := range rows {
		dead[r.row.topic] = true
	}
	l.withDead = dead
}
