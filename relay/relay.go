package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/migrations"
)

// shardAll is the only shard for now: every row is in it.
const shardAll int16 = 0

// Relay publishes outbox rows to Kafka.
type Relay struct {
	pool  *pgxpool.Pool
	kafka []kgo.Opt
	cfg   Config
	sql   queries

	suspects suspects
}

// ErrNotPrimary is returned by Run when the database is a standby: what is visible there is not in the
// order of the primary, and progress could not be stored. Nothing was published. Remedy: connect to the primary.
var ErrNotPrimary = errors.New("the database is a standby: connect the relay to the primary")

// ErrLeaseHeld is returned by Drain while another replica publishes. Nothing was published. It is safe to
// try again.
var ErrLeaseHeld = errors.New("another replica holds the relay's lease")

// errLeaseLost ends the work of this replica until it gets the lease again.
var errLeaseLost = errors.New("lease lost: another replica publishes")

// execer is what statements outside a transaction need: a pool or a connection.
type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// New returns a relay, or all problems of its configuration at once. It opens no connection. The pool
// is borrowed; four connections are enough. kafka says how to reach the brokers (seeds, TLS, SASL,
// compression); acks=all and idempotent production are set by the relay and cannot be weakened.
func New(pool *pgxpool.Pool, kafka []kgo.Opt, cfg Config) (*Relay, error) {
	cfg, err := cfg.withDefaults()
	if pool == nil {
		err = errors.Join(err, errors.New("pool is nil: want a pool of the primary"))
	}
	r := &Relay{pool: pool, kafka: kafka, cfg: cfg, sql: newQueries(cfg.Schema)}
	client, clientErr := r.newClient(nil)
	if clientErr != nil {
		return nil, errors.Join(err, clientErr)
	}
	client.Close()
	if err != nil {
		return nil, err
	}
	return r, nil
}

// Run publishes until ctx is cancelled. It waits for the lease, and it survives the loss of the
// database, of the brokers and of the lease: it logs, waits and goes on. When ctx ends it stops reading,
// waits at most DrainMax for what is with the brokers, stores progress, gives the lease back and
// returns nil. It returns an error at once for what waiting cannot mend: a schema that does not fit, a
// standby.
func (r *Relay) Run(ctx context.Context) error {
	trouble := 0
	for checked := false; ctx.Err() == nil; {
		r.turn()
		var err error
		if !checked {
			err = r.check(ctx)
			if err != nil && ctx.Err() == nil && !unreachable(err) {
				return err
			}
			checked = err == nil
		} else {
			err = r.serve(ctx)
		}
		if err == nil {
			trouble = 0
			continue
		}
		trouble++
		wait := backoff(trouble)
		r.cfg.Logger.WarnContext(ctx, "relay interrupted; it goes on from its stored progress",
			"relay", r.cfg.Name, "error", err, "retry_in", wait)
		if r.cfg.Hooks.Interrupted != nil && ctx.Err() == nil {
			r.cfg.Hooks.Interrupted(err)
		}
		pause(ctx, wait)
	}
	return nil
}

// check refuses what waiting cannot mend.
func (r *Relay) check(ctx context.Context) error {
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
	return errors.As(err, &connect) || errors.As(err, &broken) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || pgconn.SafeToRetry(err)
}

// Drain publishes until nothing waits and returns how many rows that were: the single-step form of Run
// for tests and cron jobs. It returns an error if another replica holds the lease.
func (r *Relay) Drain(ctx context.Context) (int64, error) {
	lease, err := r.acquire(ctx)
	if err != nil {
		return 0, err
	}
	if lease == nil {
		return 0, ErrLeaseHeld
	}
	return r.publish(ctx, lease, true)
}

// serve waits for the lease and publishes under it.
func (r *Relay) serve(ctx context.Context) error {
	lease, err := r.acquire(ctx)
	if err != nil {
		return err
	}
	if lease == nil {
		// A third of the lease: a dead holder is replaced soon after its lease ran out. The jitter
		// keeps replicas from asking in step.
		pause(ctx, r.cfg.Lease/6+rand.N(r.cfg.Lease/6)) //nolint:gosec // jitter needs no secret
		return nil
	}
	r.cfg.Logger.InfoContext(ctx, "relay took the lease", "relay", r.cfg.Name, "owner", r.cfg.Owner, "epoch", lease.epoch)
	if r.cfg.Hooks.Lease != nil {
		r.cfg.Hooks.Lease(shardAll, true)
		defer r.cfg.Hooks.Lease(shardAll, false)
	}
	_, err = r.publish(ctx, lease, false)
	return err
}

// turn says that a loop is not stuck.
func (r *Relay) turn() {
	if r.cfg.Hooks.Turn != nil {
		r.cfg.Hooks.Turn()
	}
}

// backoff grows from 100 ms to 5 s, with full jitter.
func backoff(attempt int) time.Duration {
	ceiling := min(100*time.Millisecond<<min(attempt, 10), 5*time.Second)
	return 50*time.Millisecond + rand.N(ceiling) //nolint:gosec // jitter needs no secret
}
