package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/internal/record"
	"github.com/effectonce/effectonce/internal/say"
	"github.com/effectonce/effectonce/migrations"
)

// Relay publishes outbox rows to Kafka.
type Relay struct {
	pool  *pgxpool.Pool
	kafka []kgo.Opt
	cfg   Config
	sql   *statements // see Relay.adapt

	adapting sync.Mutex

	clientLog     kgo.Logger       // of the caller's options; nil: none
	placing       kgo.Opt          // places records in the partition that their row requests
	careful       [shardsMax]cares // see takeCare
	uncompressed  atomic.Bool      // brokers refused compressed batches
	refusedWrites sync.Map         // topic → when brokers refused to let the relay write to it
	batches       sync.Map         // topic → size of batches, where a batch was refused for its size
	wake          wake
	paused        atomic.Pointer[pausedSet] // as of the last poll
	patience      time.Duration             // limit of a statement
	status        atomic.Pointer[Status]
	newest        atomic.Pointer[cluster] // the newest cluster on which this process held a lease
	slotWaits     map[int16]time.Time     // since when a lock keeps a slot; used only by the goroutine that runs tidy
	hung          atomic.Int64            // shards whose worker hangs
	say           sayings
}

// ErrNotPrimary is returned by Run and Drain when the database is a standby. Rows become visible there in
// another order than on the primary, and progress could not be stored. Nothing was published.
// Remedy: connect to the primary.
var ErrNotPrimary = errors.New("the database is a standby: connect the relay to the primary")

// ErrLeaseHeld is returned by Drain while another replica publishes. The number that Drain returns
// includes the rows published so far. It is safe to try again.
var ErrLeaseHeld = errors.New("another replica holds a lease of the relay")

// errLeaseLost ends the work on a shard until this replica acquires the lease again.
var errLeaseLost = errors.New("lease lost: another replica publishes this shard")

// errAnotherRun also ends the work on a shard. What was read before the server crashed, or before
// another server was promoted, is no longer valid. The same holds for what another server returns:
// a connection may lead to one.
var errAnotherRun = errors.New("the server crashed, or another server was promoted or answered: the shard continues from its stored progress")

// execer is what a statement outside a transaction needs: a pool or a connection.
type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// New returns a relay, or all problems of its configuration at once. It opens no connection. The
// caller keeps ownership of the pool. Run needs two connections, and two for each shard that it
// publishes. The kafka options say how to reach the brokers (seeds, TLS, SASL, compression). The relay
// sets acks=all and idempotent production, and no option can weaken them. With Config.Sink, kafka is nil.
func New(pool *pgxpool.Pool, kafka []kgo.Opt, cfg Config) (*Relay, error) {
	cfg, err := cfg.withDefaults()
	err = errors.Join(err, bounds.Pool(pool))
	r := &Relay{pool: pool, kafka: kafka, cfg: cfg, sql: &statements{schema: cfg.Schema, run: serverRun}, patience: cfg.patience(), slotWaits: map[int16]time.Time{}, say: sayings{logger: cfg.Logger}}
	if cfg.Sink != nil {
		if len(kafka) > 0 {
			err = errors.Join(err, errors.New("kafka options with a Sink: rows go only to the sink: remove one of the two"))
		}
	} else if client, clientErr := r.newClient(nil); clientErr != nil {
		err = errors.Join(err, clientErr)
	} else {
		r.clientLog, _ = client.OptValue(kgo.WithLogger).(kgo.Logger)
		client.Close()
		r.placing, clientErr = record.PartitionerOption(kafka)
		err = errors.Join(err, clientErr)
	}
	if err != nil {
		return nil, err
	}
	return r, nil
}

// Run publishes this replica's share of the shards until ctx is cancelled. It survives the loss of
// the database, of the brokers and of leases: it logs, waits and continues. When ctx ends, Run
// stops reading, waits at most DrainMax for unacknowledged records, stores progress, releases its
// leases and returns nil. It returns an error at once for what waiting cannot fix: a schema that
// does not fit, a standby, a primary from before a failover, a panic of Config.Topic.
func (r *Relay) Run(ctx context.Context) error {
	for times := 1; ctx.Err() == nil; times++ {
		r.heartbeat()
		err := r.check(ctx)
		if err == nil {
			m := &member{Relay: r, workers: map[int16]*worker{}, troubles: map[int16]*trouble{}}
			return m.participate(ctx)
		}
		if ctx.Err() == nil && !unreachable(err) {
			return err
		}
		r.describe("database_away", err, nil)
		wait := backoff(times)
		r.interrupted(ctx, err, wait)
		pause.For(ctx, wait)
	}
	return nil
}

// interrupted reports a failure after which the relay tries again.
func (r *Relay) interrupted(ctx context.Context, err error, wait time.Duration) {
	if ctx.Err() != nil {
		return
	}
	r.say.warn(ctx, "relay interrupted; it continues from its stored progress", "relay", r.cfg.Name, "error", err, "retry_in", wait)
	if r.cfg.Hooks.Interrupted != nil {
		r.cfg.Hooks.Interrupted(err)
	}
}

// check registers the relay, or returns an error for what waiting cannot fix.
func (r *Relay) check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, r.patience)
	defer cancel()
	if err := migrations.Check(ctx, r.pool, migrations.Options{Schema: r.cfg.Schema}); err != nil {
		return err
	}
	if err := r.adapt(ctx); err != nil {
		return err
	}
	return r.enroll(ctx)
}

// enroll registers the relay with its initial number of shards.
func (r *Relay) enroll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Lease)
	defer cancel()
	if _, err := r.pool.Exec(ctx, r.sql.of(enrollSQL), r.cfg.Name, r.cfg.Shards); err != nil {
		return fmt.Errorf("register relay: %w", err)
	}
	return nil
}

// adapt removes from the statements the functions that the database hides. It runs before any
// statement that uses them.
func (r *Relay) adapt(ctx context.Context) error {
	r.adapting.Lock()
	defer r.adapting.Unlock()
	var run string
	err := r.pool.QueryRow(ctx, r.sql.of(runSQL)).Scan(&run)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, pgx.ErrNoRows):
		return ErrNotPrimary
	case !hidden(err):
		return fmt.Errorf("read the server's run: %w", err)
	}
	r.say.warn(ctx, "the server's run is hidden: a crash that loses asynchronous commits while the relay runs will not be noticed", "error", err)
	r.sql = &statements{schema: r.cfg.Schema, run: hiddenRun}
	return nil
}

// unreachable reports whether the database did not answer, or answered that it cannot now. It returns
// false for a database that answered with a refusal.
func unreachable(err error) bool {
	if pgerr.State(err) != "" {
		return pgerr.Unavailable(err) || pgerr.Transient(err)
	}
	var connect *pgconn.ConnectError
	var broken *net.OpError
	return errors.As(err, &connect) || errors.As(err, &broken) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, context.DeadlineExceeded) || pgconn.SafeToRetry(err)
}

// Status is what a replica does, as of its last beat, which is at most 2.5 s ago.
type Status struct {
	At    time.Time // of the beat; zero: Run has not begun
	Owner string
	// State is starting, publishing, standing_by, kafka_away, stuck, database_away or
	// stopped; see docs/reference/schema.md, outbox_replicas.
	State   string
	Problem string  // why rows wait; empty: nothing is wrong
	Shards  []int16 // that the replica publishes, in order
}

// Status returns what this replica does. It is safe at any time.
func (r *Relay) Status() Status {
	if s := r.status.Load(); s != nil {
		return *s
	}
	return Status{Owner: r.cfg.Owner, State: "starting"}
}

func (r *Relay) describe(state string, problem error, shards []int16) {
	s := &Status{At: time.Now(), Owner: r.cfg.Owner, State: state, Shards: shards}
	if problem != nil {
		s.Problem = bounds.ErrorText(problem)
	}
	r.status.Store(s)
}

// Drain publishes until no row waits and returns the number of published rows. It is the
// single-step form of Run, for tests and cron jobs. It returns ErrLeaseHeld if another replica
// holds a shard.
func (r *Relay) Drain(ctx context.Context) (published int64, err error) {
	if err := r.check(ctx); err != nil {
		return 0, err
	}
	standing, err := r.beat(ctx, nil, r.publishing())
	if err != nil {
		return 0, err
	}
	defer r.leave(ctx, false)
	if err := r.checkSequences(ctx); err != nil { // before rows are inserted
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

// drainShard drains one shard. It starts over when it needs a new Kafka client.
func (r *Relay) drainShard(ctx context.Context, shard int16) (published int64, err error) {
	for idle := 0; ; idle++ {
		lease, err := r.acquire(ctx, shard)
		if err != nil {
			return published, err
		}
		if lease == nil {
			return published, ErrLeaseHeld
		}
		first := lease.n
		n, err := r.drain(ctx, lease)
		published += n
		var batch *refused
		if lease.n > first {
			idle = 0
		}
		if !errors.As(err, &batch) || idle > soonMax {
			return published, err
		}
	}
}

// drain publishes one shard and renews its lease while it does so.
func (r *Relay) drain(ctx context.Context, l *lease) (int64, error) {
	p := newPublisher(r, l)
	p.once = true
	keeping, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		for pause.For(keeping, r.cfg.Lease/3) {
			if _, err := r.beat(keeping, []*lease{l}, r.publishing(l)); err != nil && keeping.Err() == nil {
				r.say.warn(ctx, "lease could not be renewed", "relay", r.cfg.Name, "error", err)
			}
		}
	}()
	err := p.publish(ctx)
	return p.progress.rows, err
}

// heartbeat calls the hook: this loop is not stuck, and no shard hangs.
func (r *Relay) heartbeat() {
	if r.cfg.Hooks.Heartbeat != nil && r.hung.Load() == 0 {
		r.cfg.Hooks.Heartbeat()
	}
}

// backoff returns a pause of 50 ms plus a random part. The limit of that part doubles with each
// attempt, from 100 ms before the first to 5 s: a pause is below 5.05 s.
func backoff(attempt int) time.Duration {
	ceiling := min(100*time.Millisecond<<min(attempt, 10), 5*time.Second)
	return 50*time.Millisecond + rand.N(ceiling) //nolint:gosec // jitter needs no secret
}

// wake lets publishers poll the table before their pause is over.
type wake struct {
	mu sync.Mutex
	ch chan struct{}
}

// next returns a channel that the next call closes.
func (w *wake) next() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ch == nil {
		w.ch = make(chan struct{})
	}
	return w.ch
}

func (w *wake) call() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ch != nil {
		close(w.ch)
		w.ch = nil
	}
}

// Wake makes the relay poll the outbox now, instead of at the end of its pause (PollMax at most).
// It is for programs that publish and relay in one process. Call it after COMMIT. It is safe at any
// time and never blocks. A call that comes too early, or a missing call, only costs the pause.
func (r *Relay) Wake() { r.wake.call() }

// sayings logs lasting conditions: each text once, and then every 30 s with the number of
// repetitions.
type sayings struct {
	logger *slog.Logger
	lines  say.Lines
}

// warn logs a problem. The attributes, such as an error or a shard, may differ each time.
func (s *sayings) warn(ctx context.Context, text string, attrs ...any) {
	if times, due := s.lines.Due(text, false); due {
		s.logger.WarnContext(ctx, text, append(attrs, "times", times)...)
	}
}

// about logs an error of one of several things with the same problem, such as topics.
func (s *sayings) about(ctx context.Context, thing, text string, attrs ...any) {
	if times, due := s.lines.Due(text+"\x00"+thing, false); due {
		s.logger.ErrorContext(ctx, text, append(attrs, "times", times)...)
	}
}

// over logs the end of a problem, if the problem was logged.
func (s *sayings) over(ctx context.Context, problem, text string, attrs ...any) {
	if ended, was := s.lines.End(problem); was {
		s.logger.InfoContext(ctx, text, append(attrs, "times", ended.Times, "lasted", ended.Lasted.Round(time.Millisecond))...)
	}
}
