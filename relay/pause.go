package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/migrations"
)

// Operator identifies the relay that an operator acts on, the operator, and the reason. Who and Why
// are stored in operator_actions; functions that only read do not need them.
type Operator struct {
	// Schema that holds the tables. Default "effectonce"; bounds as in migrations.Options.
	Schema string
	// Relay is the name of the relay. Default "default".
	Relay string
	// Who acts, at most 255 bytes, and Why, at most 2048.
	Who, Why string
}

func (o Operator) resolve() (Operator, error) {
	schema, err := migrations.Options{Schema: o.Schema}.Resolve()
	o.Schema = schema
	if o.Relay == "" {
		o.Relay = "default"
	}
	return o, err
}

// PausedTopic is a topic whose rows wait in outbox_dead.
type PausedTopic struct {
	Topic    string    `json:"topic"`
	Who      string    `json:"who"`
	Why      string    `json:"why"`
	PausedAt time.Time `json:"paused_at"`
}

// Pause makes the rows of topics wait: they move to outbox_dead, and so do later rows of their
// keys. Other topics continue. Topics that are already paused stay as they are. Pause returns the
// topics that were not paused before.
//
// It stores the pauses, and waits until they hold: every live replica of the relay has confirmed
// that each row that it read before them is acknowledged by Kafka, or waits. That takes up to half
// of the relay's Lease, 5 s at most. It takes longer while Kafka does not acknowledge, or
// if a replica died (until its lease is over). It does not wait for a topic that was resumed
// meanwhile. If they do not hold within wait, or ctx ends, it returns an UnconfirmedError; a wait of
// 0 only stores them. One limit: a broker that hangs, and answers after the relay has given up its
// connection, may still append rows that were in flight; they are published again after Resume.
func Pause(ctx context.Context, pool *pgxpool.Pool, by Operator, wait time.Duration, topics ...string) ([]string, error) {
	changed, err := changePaused(ctx, pool, pauseSQL, by, topics)
	if err != nil || wait == 0 {
		return changed, err
	}
	by, _ = by.resolve() // without an error: changePaused did it, too
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	unconfirmed := &UnconfirmedError{Owners: []string{"any replica, since the database did not answer"}}
	for {
		var runs bool
		var owners []string
		err := pool.QueryRow(ctx, migrations.InSchema(unconfirmedSQL, by.Schema), by.Relay, topics).Scan(&runs, &owners)
		switch {
		case err != nil && ctx.Err() == nil:
			return changed, fmt.Errorf("ask which replicas obey the pause: %w", err)
		case err != nil:
		case !runs:
			return changed, &UnconfirmedError{}
		case len(owners) == 0:
			return changed, nil
		default:
			unconfirmed.Owners = owners
		}
		if ctx.Err() != nil || !pause.For(ctx, confirmEvery) {
			return changed, unconfirmed
		}
	}
}

// confirmEvery is the pause between two polls for confirmations.
const confirmEvery = 100 * time.Millisecond

// UnconfirmedError is returned by Pause if the pauses are stored, and do not hold yet: replicas may
// still publish rows that they read before.
type UnconfirmedError struct {
	Owners []string // of the replicas, with the reason where it is known; none: no replica of the relay runs
}

func (e *UnconfirmedError) Error() string {
	if len(e.Owners) == 0 {
		return "no replica of the relay runs: the pause holds once one does"
	}
	return "not confirmed by " + strings.Join(e.Owners, ", ") + ": it may still publish rows that it read before the pause"
}

// Resume ends a pause: the rows are published in their order, and then the rows behind them. It
// returns the topics that were paused.
func Resume(ctx context.Context, pool *pgxpool.Pool, by Operator, topics ...string) ([]string, error) {
	return changePaused(ctx, pool, resumeSQL, by, topics)
}

func changePaused(ctx context.Context, pool *pgxpool.Pool, sql string, by Operator, topics []string) ([]string, error) {
	by, err := by.resolve()
	if err = errors.Join(err, checkTopics(topics)); err != nil {
		return nil, err
	}
	rows, _ := pool.Query(ctx, migrations.InSchema(sql, by.Schema), by.Relay, topics, by.Who, by.Why)
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

func checkTopics(topics []string) (err error) {
	if len(topics) == 0 {
		err = errors.New("no topic is given")
	}
	for _, topic := range topics {
		if !topicName.MatchString(topic) {
			err = errors.Join(err, fmt.Errorf("topic %.260q: Kafka takes 1 to 249 letters, digits, dots, underscores and hyphens", topic))
		}
	}
	return err
}

// WithoutRows returns the topics that are not paused and have no row in outbox, outbox_dead and
// outbox_scheduled. It reads the whole outbox for a topic without rows: give it a deadline.
func WithoutRows(ctx context.Context, pool *pgxpool.Pool, of Operator, topics ...string) ([]string, error) {
	of, err := of.resolve()
	if err != nil {
		return nil, err
	}
	rows, _ := pool.Query(ctx, migrations.InSchema(withoutRowsSQL, of.Schema), of.Relay, topics)
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// PausedTopics lists the paused topics by name.
func PausedTopics(ctx context.Context, pool *pgxpool.Pool, of Operator) ([]PausedTopic, error) {
	of, err := of.resolve()
	if err != nil {
		return nil, err
	}
	rows, _ := pool.Query(ctx, migrations.InSchema(pausedSQL, of.Schema), of.Relay)
	return pgx.CollectRows(rows, pgx.RowToStructByPos[PausedTopic])
}

// pausedSet is the topics that were paused at one poll of the relay. It is immutable; a poll that
// finds other pauses makes a new one.
type pausedSet struct {
	topics []string
	ids    []string // of the pauses, in order; see outbox_paused
}

func (s *pausedSet) has(topic string) bool { return s != nil && slices.Contains(s.topics, topic) }

// pausesFound stores the pauses that a poll found. Sleeping workers follow at once.
func (r *Relay) pausesFound(topics, ids []string) {
	if known := r.paused.Load(); known != nil && slices.Equal(known.ids, ids) {
		return
	}
	r.paused.Store(&pausedSet{topics: topics, ids: ids})
	r.wake.call()
}

// followPauses adopts the pauses that the relay knows, once nothing that was sorted under the
// earlier ones is in flight or in a transaction. It runs before anything is sorted, and costs two
// loads while nothing changed.
func (p *publisher) followPauses(work, ctx context.Context) error {
	now := p.paused.Load()
	if p.lease.obeys.Load() == now {
		return nil
	}
	if err := p.target.finish(work, ctx); err != nil {
		return err
	}
	p.lease.obeys.Store(now)
	p.dead.look.rounds.Store(0)
	return nil
}

// obeyed returns the pauses that every worker obeys. leases are all leases of this replica.
func (r *Relay) obeyed(leases []*lease) []string {
	ids := []string{}
	known := r.paused.Load()
	if known == nil {
		return ids
	}
	for _, id := range known.ids {
		if !slices.ContainsFunc(leases, func(l *lease) bool {
			set := l.obeys.Load()
			return set == nil || !slices.Contains(set.ids, id)
		}) {
			ids = append(ids, id)
		}
	}
	return ids
}
