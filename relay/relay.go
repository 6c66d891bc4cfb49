package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/internal/partitions"
	"github.com/effectonce/effectonce/migrations"
)

// Relay publishes outbox rows to Kafka.
type Relay struct {
	pool  *pgxpool.Pool
	kafka []kgo.Opt
	cfg   Config
	sql   queries // see adapt

	adapting sync.Mutex
	adapted  bool

	placing     kgo.Opt // puts records into the partition that their row asks for
	routes      *routes
	drops       drops
	rates       rates
	suspects    suspects
	topicMemory topicMemory
	wake        wake
	paused      atomic.Pointer[pausedSet] // as of the last look
	patience    time.Duration             // with a statement
	newest      atomic.Pointer[cluster]   // that this process had a lease on
	slotWaits   map[int16]*slotWait       // of the goroutine that tidies up
	overdue     atomic.Int64              // calls of the sink that go on though their context ended
	seen        seen                      // a number that a sequence was behind
	hung        atomic.Int64              // shards whose work hangs
	outlet      outlet
	say         sayings
	horizon     *horizon // nil: publishing waits for no standby
}

// ErrNotPrimary is returned by Run when the database is a standby: what is visible there is not in the
// order of the primary, and progress could not be stored. Nothing was published. Remedy: connect to the primary.
var ErrNotPrimary = errors.New("the database is a standby: connect the relay to the primary")

// ErrLeaseHeld is returned by Drain while another replica publishes. What was published is counted. It is safe
// to try again.
var ErrLeaseHeld = errors.New("another replica holds a lease of the relay")

// errLeaseLost ends the work on a shard until this replica gets its lease again.
var errLeaseLost = errors.New("lease lost: another replica publishes this shard")

// errAnotherRun ends it, too: what was read before the server crashed, or another was promoted, says nothing now. Nor
// does what another server shows: a connection may have led to one.
var errAnotherRun = errors.New("the server crashed, or another was promoted or answered: the shard goes on from its stored progress")

// execer is what statements outside a transaction need: a pool or a connection.
type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// New returns a relay, or all problems of its configuration at once. It opens no connection. The pool
// is borrowed; four connections are enough. kafka says how to reach the brokers (seeds, TLS, SASL,
// compression); acks=all and idempotent production are set by the relay and cannot be weakened. With Config.Sink it is nil.
func New(pool *pgxpool.Pool, kafka []kgo.Opt, cfg Config) (*Relay, error) {
	cfg, err := cfg.withDefaults()
	err = errors.Join(err, bounds.Pool(pool))
	r := &Relay{pool: pool, kafka: kafka, cfg: cfg, sql: newQueries(cfg.Schema, serverRun), patience: cfg.patience(), routes: newRoutes(cfg.Routes), say: sayings{logger: cfg.Logger}}
	r.horizon, _ = parseHorizon(cfg.DurableHorizon) // withDefaults has the error
	if cfg.Sink != nil {
		if len(kafka) > 0 {
			err = errors.Join(err, errors.New("kafka options with a Sink: rows go to the sink alone: remove one of the two"))
		}
	} else if client, clientErr := r.newClient(nil, nil); clientErr != nil {
		err = errors.Join(err, clientErr)
	} else {
		client.Close()
		r.placing, clientErr = partitions.Option(kafka)
		err = errors.Join(err, clientErr)
	}
	if err != nil {
		return nil, err
	}
	return r, nil
}

// Run publishes until ctx is cancelled: the share of shards that falls to this replica. It survives the loss of
// the database, of the brokers and of leases: it logs, waits and goes on. When ctx ends it stops reading,
// waits at most DrainMax for what is with the brokers, stores progress, gives its leases back and
// returns nil. It returns an error at once for what waiting cannot mend: a schema that does not fit, a
// standby, a primary from before a failover.
func (r *Relay) Run(ctx context.Context) error {
	for trouble := 1; ctx.Err() == nil; trouble++ {
		r.turn()
		err := r.check(ctx)
		if err == nil {
			return newMember(r).run(ctx)
		}
		if ctx.Err() == nil && !unreachable(err) {
			return err
		}
		pause(ctx, r.interrupted(ctx, err, trouble))
	}
	return nil
}

// interrupted says what went wrong, and how long to wait before the next attempt.
func (r *Relay) interrupted(ctx context.Context, err error, trouble int) time.Duration {
	wait := backoff(trouble)
	if ctx.Err() == nil {
		r.say.warn(ctx, "relay interrupted; it goes on from its stored progress", "relay", r.cfg.Name, "error", err, "retry_in", wait)
		if r.cfg.Hooks.Interrupted != nil {
			r.cfg.Hooks.Interrupted(err)
		}
	}
	return wait
}

// check refuses what waiting cannot mend.
func (r *Relay) check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, r.patience)
	defer cancel()
	if err := migrations.Check(ctx, r.pool, migrations.Options{Schema: r.cfg.Schema}); err != nil {
		return err
	}
	var primary bool
	if err := r.pool.QueryRow(ctx, primarySQL).Scan(&primary); err != nil {
		return fmt.Errorf("ask whether the database is a primary: %w", err)
	}
	if !primary {
		return ErrNotPrimary
	}
	if err := r.checkHorizon(ctx); err != nil {
		return err
	}
	return r.adapt(ctx)
}

// adapt leaves functions out of statements that the database hides. It comes before everything that uses them.
func (r *Relay) adapt(ctx context.Context) error {
	r.adapting.Lock()
	defer r.adapting.Unlock()
	if r.adapted {
		return nil
	}
	var run string
	err := r.pool.QueryRow(ctx, migrations.InSchema(runSQL, r.cfg.Schema)).Scan(&run)
	if err != nil && !hidden(err) {
		return fmt.Errorf("ask for the server's run: %w", err)
	}
	if err != nil {
		r.sql = newQueries(r.cfg.Schema, unknownRun)
	}
	r.adapted = true
	return nil
}

// unreachable tells a database that does not answer, or is starting or stopping, from one that refuses.
func unreachable(err error) bool {
	var refusal *pgconn.PgError
	if errors.As(err, &refusal) {
		return strings.HasPrefix(refusal.Code, "57P") || strings.HasPrefix(refusal.Code, "53")
	}
	var connect *pgconn.ConnectError
	var broken *net.OpError
	return errors.As(err, &connect) || errors.As(err, &broken) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, context.DeadlineExceeded) || pgconn.SafeToRetry(err)
}

// Drain publishes until nothing waits and returns how many rows that were: the single-step form of Run
// for tests and cron jobs. It returns an error if another replica holds a shard.
func (r *Relay) Drain(ctx context.Context) (published int64, err error) {
	if err := errors.Join(r.adapt(ctx), r.checkHorizon(ctx)); err != nil {
		return 0, err
	}
	if _, err := r.pool.Exec(ctx, r.sql.enroll, r.cfg.Name, r.cfg.Shards); err != nil {
		return 0, fmt.Errorf("make the relay known: %w", err)
	}
	standing, err := r.beat(ctx, nil, r.publishing())
	if err != nil {
		return 0, err
	}
	defer r.leave(ctx)
	here, err := r.askCluster(ctx)
	if err != nil {
		return 0, err
	}
	if _, err := r.checkSequences(ctx, here.run); err != nil { // before rows are inserted
		return 0, err
	}
	if _, err := r.promoteDue(ctx); err != nil {
		return 0, err
	}
	for shard := range standing.shards {
		n, err := r.drainShard(ctx, shard)
		published += n
		if err != nil {
			return published, err
		}
	}
	return published, nil
}

// drainShard starts over where it needs another client.
func (r *Relay) drainShard(ctx context.Context, shard int16) (published int64, err error) {
	for {
		lease, err := r.acquire(ctx, shard)
		if err != nil {
			return published, err
		}
		if lease == nil {
			return published, ErrLeaseHeld
		}
		n, err := r.drain(ctx, lease)
		published += n
		if !errors.Is(err, errLimitsChanged) {
			return published, err
		}
	}
}

// drain publishes one shard, and keeps its lease meanwhile.
func (r *Relay) drain(ctx context.Context, l *lease) (int64, error) {
	p := newPublisher(r, l)
	p.once = true
	keeping, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		for pause(keeping, r.cfg.Lease/3) {
			if _, err := r.beat(keeping, []*lease{l}, r.publishing(l)); err != nil && keeping.Err() == nil {
				r.say.warn(ctx, "lease could not be renewed", "relay", r.cfg.Name, "error", err)
			}
		}
	}()
	err := p.publish(ctx)
	return p.progress.rows, err
}

// turn says that a loop is not stuck. Statements, and waiting for brokers, end by themselves; a sink may not.
func (r *Relay) turn() {
	if r.cfg.Hooks.Turn != nil && r.overdue.Load() == 0 && r.hung.Load() == 0 {
		r.cfg.Hooks.Turn()
	}
}

// backoff grows from 100 ms to 5 s, with full jitter.
func backoff(attempt int) time.Duration {
	ceiling := min(100*time.Millisecond<<min(attempt, 10), 5*time.Second)
	return 50*time.Millisecond + rand.N(ceiling) //nolint:gosec // jitter needs no secret
}
