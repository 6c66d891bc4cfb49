package consumer

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/internal/kafkaclient"
	"github.com/effectonce/effectonce/internal/nodedup"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/outbox"
)

// Consumer runs a handler over the messages of a consumer group's topics.
type Consumer struct {
	pool    *pgxpool.Pool
	kafka   []kgo.Opt
	cfg     Config
	handler Handler
	claims  *dedup.Claims
	outbox  *outbox.Outbox // for dead letters
	owner   string
	sql     map[string]string // by the constant that is the statement for the standard schema
	timeout [3]string         // settings, in milliseconds
	// unclaimed handles every message without a claim: see internal/nodedup.
	unclaimed bool

	watchEvery, lookEvery, idleEvery time.Duration

	// slots bounds the connections that transactions use: handlers that ask the same pool for one
	// must not wait for each other.
	slots     chan struct{}
	abandoned atomic.Int32 // abandoned attempts that still run
	hooked    atomic.Int32 // the same for hooks
	warnPlain sync.Once
	sayAlone  sync.Once

	phase   atomic.Pointer[phaseNow]
	ids     map[string]dedup.Consumer // by topic; written before a session starts
	names   map[string]string         // the consumer's name, by topic; as ids
	session atomic.Pointer[session]   // the last one
}

// ErrNotPrimary is returned by Run if the database is a standby. Nothing was consumed. Remedy:
// connect to the primary.
var ErrNotPrimary = errors.New("the database is a standby: connect the consumer to the primary")

// ErrUnknownTopic is returned by Run if one of Config.Topics does not exist. Nothing was consumed.
// Remedy: create the topic, or correct its name. A client that may create topics
// (kgo.AllowAutoTopicCreation) waits for them.
var ErrUnknownTopic = errors.New("topic does not exist")

// New returns a consumer, or all problems of its configuration at once. It opens no connection. The
// caller keeps the pool, for this consumer alone, and closes it; each running partition takes one of its connections. The
// options kafka are for the connection to the brokers (seeds, TLS, SASL, session timeout,
// balancers). The consumer sets group, topics, offsets, isolation and rebalancing; its settings
// override these options.
func New(pool *pgxpool.Pool, kafka []kgo.Opt, handler Handler, cfg Config) (*Consumer, error) {
	cfg, err := cfg.withDefaults()
	err = errors.Join(err, bounds.Pool(pool))
	if handler == nil {
		err = errors.Join(err, errors.New("handler is nil: create one with Each, Queued, Batch, JSON or Route"))
	}
	if router, ok := handler.(*Router); ok {
		for _, topic := range cfg.Topics {
			if !router.routes(topic) && !router.routes(cfg.alias(topic)) {
				err = errors.Join(err, fmt.Errorf("Topics: %q has no routes: all its messages would be parked; see Router.Topics", topic))
			}
		}
	}
	if err != nil {
		return nil, err
	}
	for _, wrap := range slices.Backward(cfg.Middleware) {
		handler = wrap(handler)
	}
	claims, err := dedup.New(dedup.Config{Schema: cfg.Schema})
	letters, lettersErr := outbox.New(outbox.Config{Schema: cfg.Schema})
	if err = errors.Join(err, lettersErr); err != nil {
		return nil, err
	}
	milliseconds := func(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }
	c := &Consumer{
		pool: pool, kafka: kafka, cfg: cfg, handler: handler, claims: claims, outbox: letters, owner: bounds.Owner(), sql: newQueries(cfg.Schema),
		timeout:    [3]string{milliseconds(cfg.StatementTimeout), milliseconds(cfg.LockTimeout), milliseconds(cfg.IdleTimeout)},
		watchEvery: watchEvery, lookEvery: lookEvery, idleEvery: idleEvery, slots: make(chan struct{}, max(1, int(pool.Config().MaxConns)-1)),
	}
	c.enter(PhaseStopped, nil)
	if err := kgo.ValidateOpts((&session{consumer: c}).options()...); err != nil { // it does not run
		return nil, fmt.Errorf("kafka options: %w", err)
	}
	return c, c.checkDrain()
}

// checkDrain rejects a DrainMax that is not below the rebalance timeout: another member would get
// the partitions before their batches have ended.
func (c *Consumer) checkDrain() error {
	client, err := kafkaclient.New(c.kafka...) // it connects on first use
	if err != nil {
		return fmt.Errorf("kafka options: %w", err)
	}
	defer client.Close()
	if limit, ok := client.OptValue(kgo.RebalanceTimeout).(time.Duration); ok && c.cfg.DrainMax >= limit {
		return fmt.Errorf("DrainMax %v: want less than the rebalance timeout of Kafka's client, which is %v (kgo.RebalanceTimeout)", c.cfg.DrainMax, limit)
	}
	return nil
}

// Run consumes until ctx is cancelled. It survives the loss of the database and of the brokers: it
// logs, waits and continues. When ctx ends it stops fetching, lets each partition finish its batch
// for at most DrainMax, commits the offsets to Kafka, leaves the group and returns nil. It returns
// an error at once for conditions that waiting cannot change: an incompatible schema, a standby, a
// name that is taken, a topic that does not exist. Run may be called again after it returned, but
// not concurrently.
//
// Handlers get a context with the values of ctx that does not end with ctx: see Config.DrainMax. A
// tracing span in ctx would be the parent of everything that happens until Run returns.
func (c *Consumer) Run(ctx context.Context) (err error) {
	c.enter(PhaseStarting, nil)
	defer func() { c.enter(PhaseStopped, err) }()
	if err := c.await(ctx, "the database", c.prepare); err != nil {
		return err
	}
	if err := c.await(ctx, "Kafka", c.topicsExist); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return nil
	}
	began := time.Now()
	c.logStart(ctx)
	defer func() {
		c.cfg.Logger.InfoContext(ctx, "consumer stopped", "group", c.cfg.Group, "ran_for", readable(time.Since(began)))
	}()
	var upkeep sync.WaitGroup
	defer upkeep.Wait()
	upkeep.Go(func() { c.claims.KeepUp(ctx, c.pool, c.owner, c.cfg.Logger) })
	for attempt := 1; ctx.Err() == nil; attempt++ {
		began := time.Now()
		c.join(ctx, attempt)
		if time.Since(began) > c.cfg.RetryMax+time.Minute {
			attempt = 0 // the membership lasted: earlier failures no longer count
		}
	}
	return nil
}

// join runs one membership in the group. If it ends before ctx does, Run begins another one.
func (c *Consumer) join(ctx context.Context, attempt int) {
	s := newSession(ctx, c)
	c.session.Store(s)
	c.enter(PhaseJoining, nil)
	err := s.consume(ctx)
	if ctx.Err() == nil {
		c.enter(PhaseJoining, err)
		wait := c.engineBackoff(attempt)
		c.cfg.Logger.WarnContext(ctx, "rejoining the group", "group", c.cfg.Group, "error", err, "retry_in", readable(wait))
		pause.For(ctx, wait)
	}
}

// await repeats a check of what does not answer yet. It returns nil if ctx ends first.
func (c *Consumer) await(ctx context.Context, what string, check func(context.Context) error) error {
	for attempt := 1; ctx.Err() == nil; attempt++ {
		err := check(ctx)
		if err == nil || !waitable(err) {
			return err
		}
		wait := c.engineBackoff(attempt)
		c.enter(PhaseStarting, err)
		c.cfg.Logger.WarnContext(ctx, "waiting for "+what, "group", c.cfg.Group, "error", err, "retry_in", readable(wait))
		pause.For(ctx, wait)
	}
	return nil
}

const (
	// missingLooks is how often a topic is looked up before it counts as missing: a broker learns
	// of a new topic only after the controller has answered.
	missingLooks = 4
	// missingPause is the pause between two lookups.
	missingPause = 500 * time.Millisecond
)

// topicsExist returns ErrUnknownTopic for topics that the brokers do not know. A topic that the
// consumer may not read does not count as missing: the session reports that error.
func (c *Consumer) topicsExist(ctx context.Context) error {
	client, err := kafkaclient.New(c.kafka...)
	if err != nil {
		return fmt.Errorf("kafka options: %w", err)
	}
	defer client.Close()
	if created, _ := client.OptValue(kgo.AllowAutoTopicCreation).(bool); created {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, acquisitionMax)
	defer cancel()
	var missing []string
	for look := 0; look < missingLooks; look++ {
		if look > 0 {
			pause.For(ctx, missingPause)
		}
		metadata, err := kadm.NewClient(client).Metadata(kadm.WithAuthorizedOps(ctx), c.cfg.Topics...) // else each look has the answer of the first
		if err != nil {
			return fmt.Errorf("ask Kafka for topics: %w", err)
		}
		missing = slices.DeleteFunc(slices.Clone(c.cfg.Topics), func(name string) bool {
			topic, ok := metadata.Topics[name]
			return ok && !errors.Is(topic.Err, kerr.UnknownTopicOrPartition)
		})
		if len(missing) == 0 {
			return nil
		}
	}
	return fmt.Errorf("%w: %s (Config.Topics of group %q): create it, or correct the name", ErrUnknownTopic, strings.Join(missing, ", "), c.cfg.Group)
}

// prepare checks the database and registers the consumer's names.
func (c *Consumer) prepare(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, acquisitionMax)
	defer cancel()
	c.unclaimed = nodedup.In(ctx)
	if err := migrations.Check(ctx, c.pool, migrations.Options{Schema: c.cfg.Schema}); err != nil {
		return err
	}
	var primary bool
	if err := c.pool.QueryRow(ctx, primarySQL).Scan(&primary); err != nil {
		return fmt.Errorf("ask whether the database is a primary: %w", err)
	}
	if !primary {
		return ErrNotPrimary
	}
	wanted, err := c.cfg.idRule()
	if err != nil {
		return err
	}
	ids, named := make(map[string]dedup.Consumer, len(c.cfg.Topics)), make(map[string]string, len(c.cfg.Topics))
	for _, topic := range c.cfg.Topics {
		alias := c.cfg.alias(topic)
		name, topics := c.cfg.Group+"/"+alias, slices.DeleteFunc(slices.Clone(c.cfg.Topics), func(other string) bool {
			return c.cfg.alias(other) != alias
		})
		if c.cfg.Name != "" {
			name, topics = c.cfg.Name, c.cfg.Topics
		}
		aliases := make([]string, len(topics))
		for i, of := range topics {
			aliases[i] = c.cfg.alias(of)
		}
		id, err := c.claims.Register(ctx, c.pool, dedup.Registration{
			Name: name, Group: c.cfg.Group, Topics: topics, Aliases: aliases, Window: c.cfg.Window, Forever: c.cfg.Forever, IDRule: wanted,
		})
		if err != nil {
			return err
		}
		ids[topic], named[topic] = id, name
		if c.ids == nil {
			c.warnRule(ctx, name, wanted, id.IDRule())
		}
		if before := id.Replaced(); c.ids == nil && before != 0 {
			c.cfg.Logger.WarnContext(ctx, "another dedup window was registered before, by another replica or an earlier configuration; "+
				"maintenance uses the window that was registered last: configure the same window in all replicas", "group", c.cfg.Group, "consumer", name, "before", before.String(), "registered", c.cfg.Window.String())
		}
	}
	c.ids, c.names = ids, named
	return c.checkOtherNames(ctx)
}

var errOtherName = errors.New("messages of an earlier name of the group wait in parked_messages")

// checkOtherNames returns an error if messages wait in parked_messages under another name of the group.
// A consumer with these names would not retry them, and would handle later messages of their keys first.
func (c *Consumer) checkOtherNames(ctx context.Context) error {
	ids := []int32{}
	for _, id := range c.ids {
		ids = append(ids, id.ID())
	}
	var name string
	var n int64
	err := c.pool.QueryRow(ctx, c.sql[otherNameSQL], c.cfg.Group, c.cfg.Topics, ids).Scan(&name, &n)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil
	case err != nil:
		return fmt.Errorf("look for parked messages of other names: %w", err)
	}
	return fmt.Errorf("%w: %d of %q, which a consumer with another name would not retry: run with that Config.Name (or alias) until they are done, or discard them (outbox-relay parked discard)", errOtherName, n, name)
}

// logStart logs the configuration with which the consumer starts.
func (c *Consumer) logStart(ctx context.Context) {
	cfg := &c.cfg
	names, rules := make([]string, len(cfg.Topics)), make([]string, len(cfg.Topics))
	for i, topic := range cfg.Topics {
		names[i], rules[i] = c.names[topic], c.idRule(topic)
	}
	attrs := []any{
		"group", cfg.Group, "topics", cfg.Topics, "consumers", slices.Compact(names), "id_rules", slices.Compact(rules), "owner", c.owner,
		"batch_max", cfg.BatchMax, "workers", cfg.Workers,
	}
	if !cfg.Forever {
		attrs = append(attrs, "window", cfg.Window.String())
	}
	cfg.Logger.InfoContext(ctx, "consumer started", attrs...)
}

// readable formats a duration for a log line. A JSON log handler would print nanoseconds.
func readable(d time.Duration) string { return d.Round(time.Millisecond).String() }

// engineBackoff is the pause before what no message made fail is tried again: it may not take the hour
// that Config.RetryMin may give a message.
func (c *Consumer) engineBackoff(attempt int) time.Duration {
	return backoff(attempt, min(c.cfg.RetryMin, time.Second), min(c.cfg.RetryMax, 30*time.Second))
}

// backoff returns shortest/2 plus a random part, whose limit doubles from shortest to longest.
func backoff(attempt int, shortest, longest time.Duration) time.Duration {
	return shortest/2 + rand.N(min(shortest<<min(max(attempt-1, 0), 20), longest)) //nolint:gosec // jitter needs no secret
}
