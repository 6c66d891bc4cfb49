package relay

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/pgerr"
)

// cluster identifies the origin of the transaction ids in the ticks: see clusterSQL. A field is nil
// if the database does not show it.
type cluster struct {
	system   *int64
	timeline *int32
	run      string // of the server: see serverRun
	database string // as the server calls it; a pooler may have another name
}

// lease is the right to publish a shard, until the database's clock passes its end. Its epoch is in
// every write of progress, so a holder that lost it cannot store anything.
type lease struct {
	shard, shards int16
	epoch         int64
	// Stored progress, and its number in the chain: see progress. Rows of the chain up to cleared
	// were deleted under this lease.
	cursor     cursor
	made       int64 // the epoch under which it was stored
	published  int64 // how many rows it covers
	n, cleared int64
	journal    *int64 // offset of the progress record that stored progress is a copy of
	cluster    cluster
	// seq was the last number assigned before the statement that took the lease: see passing.
	seq int64
	// trusted is when this process stops trusting its lease, by its own monotonic clock. It counts
	// from before the statement that took or renewed the lease, and ends a tenth early, so it ends
	// before the database's lease does. A process that was frozen finds it expired when it resumes.
	trusted atomic.Pointer[time.Time]
	// obeys is the pauses that the worker obeys: everything that it has in flight was sorted under this
	// set. Only the worker's own goroutine, the one that sorts pages, stores it.
	obeys atomic.Pointer[pausedSet]
}

func (l *lease) trust(asked time.Time, length time.Duration) {
	until := asked.Add(length - length/10)
	l.trusted.Store(&until)
}

func (l *lease) held() bool { return time.Now().Before(*l.trusted.Load()) }

// watch returns errLeaseLost as soon as the lease is not certain to be held, because no renewal
// succeeded in time: this process was frozen or cut off, and another replica may already publish.
func (l *lease) watch(ctx context.Context) error {
	for pause.For(ctx, max(time.Millisecond, time.Until(*l.trusted.Load()))) {
		if !l.held() {
			return errLeaseLost
		}
	}
	return nil
}

// askCluster returns the cluster, and the last number that the outbox's sequence assigned. It leaves out what some hosted databases do not show. Only a refusal counts as that. A
// connection that a failover broke does not count, since the next statement may reach the new
// primary.
func (r *Relay) askCluster(ctx context.Context) (c cluster, seq int64, err error) {
	if err := r.pool.QueryRow(ctx, clusterSQL).Scan(&c.system, &c.timeline); err != nil {
		if !hidden(err) {
			return c, 0, fmt.Errorf("read the cluster's identity: %w", err)
		}
		r.say.warn(ctx, "the cluster's identity is unknown: a restore into another cluster, or an old primary, will not be noticed", "error", err)
		c = cluster{}
	}
	if err := r.pool.QueryRow(ctx, r.sql.of(seqSQL)).Scan(&c.run, &c.database, &seq); err != nil {
		return c, 0, fmt.Errorf("read the server's run, and the outbox's sequence: %w", err)
	}
	if timeline, _, _ := strings.Cut(c.run, "/"); c.timeline != nil && timeline != "" && timeline != fmt.Sprintf("%08X", *c.timeline) {
		return c, 0, errAnotherRun // two connections, two servers
	}
	return c, seq, nil
}

// hidden reports whether the database does not have a function, or does not allow it.
func hidden(err error) bool {
	return pgerr.Is(err, pgerr.InsufficientPrivilege, pgerr.UndefinedFunction, pgerr.FeatureNotSupported, pgerr.WrongState)
}

// acquire takes the lease of a shard. It returns nil while another replica holds the shard.
func (r *Relay) acquire(ctx context.Context, shard int16) (*lease, error) {
	// A connection that is dead without an error must not block the replica's other work.
	asking, cancel := context.WithTimeout(ctx, r.cfg.Lease)
	defer cancel()
	l := &lease{shard: shard}
	var err error
	if l.cluster, l.seq, err = r.askCluster(asking); err != nil {
		return nil, err
	}
	// An old primary's own progress does not show that a later primary exists; this process may
	// have seen it.
	if newest := r.newest.Load(); newest != nil {
		if _, err := l.cluster.movedFrom(*newest); err != nil {
			return nil, err
		}
	}
	// Before anything is compared with numbers, and before a recovery stores a tick.
	if err := r.checkSequences(ctx); err != nil {
		return nil, err
	}
	// A session that has the row locked must not keep this replica from renewing the leases that it
	// holds.
	taking, stop := r.answered(ctx, r.takeMax())
	defer stop()
	asked := time.Now()
	var from int64
	var to *int64
	var known cluster
	err = r.pool.QueryRow(taking, r.sql.of(acquireSQL), l.cluster.run, r.cfg.Name, shard, r.cfg.Owner, r.cfg.Lease, l.cluster.system, l.cluster.timeline).
		Scan(&l.epoch, &l.shards, &from, &to, &l.cursor.seq, &l.cursor.floor, &known.system, &known.timeline, &l.made, &l.published, &l.n, &l.journal)
	if errors.Is(err, pgx.ErrNoRows) || pgerr.Is(err, pgerr.UniqueViolation) { // the previous holder wrote progress concurrently: the next poll finds it
		return nil, nil //nolint:nilnil // no lease is not an error
	}
	if err != nil {
		return nil, fmt.Errorf("take the lease of shard %d: %w", shard, err)
	}
	l.trust(asked, r.cfg.Lease)
	if err := r.begin(ctx, l, known, from, to); err != nil {
		r.giveBack(ctx, l)
		return nil, err
	}
	newest := l.cluster
	r.newest.Store(&newest)
	return l, nil
}

// begin finds where a lease begins: at stored progress, or after a recovery: in another cluster, and
// where SetShards has left only a floor.
func (r *Relay) begin(ctx context.Context, l *lease, known cluster, from int64, to *int64) error {
	moved, err := l.cluster.movedFrom(known)
	if err != nil {
		return err
	}
	switch {
	case moved, from == 0 && l.cursor.floor > 0:
		to = nil
		if from, err = r.recover(ctx, l, known); err != nil {
			return err
		}
	case from == 0:
		// No published rows are known, so progress does not show whether the rows came from another
		// cluster.
		if err := r.stamp(ctx, l, func(pgx.Tx) error { return nil }); err != nil {
			return fmt.Errorf("find rows of another cluster: %w", err)
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, r.patience, errNoAnswer)
	defer cancel()
	l.cursor.from, err = r.loadTick(ctx, l.cluster.run, from)
	if err == nil && to != nil {
		l.cursor.to, err = r.loadTick(ctx, l.cluster.run, *to)
	}
	return silence(ctx, err)
}

// takeMax bounds a statement that is part of taking a lease.
func (r *Relay) takeMax() time.Duration { return max(r.cfg.Lease/2, time.Second) }

// giveBack releases the lease early. If it fails, the other replicas only wait for the rest of the
// lease.
func (r *Relay) giveBack(ctx context.Context, l *lease) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.cfg.Lease)
	defer cancel()
	if _, err := r.pool.Exec(ctx, r.sql.of(releaseSQL), r.cfg.Name, l.shard, l.epoch); err != nil {
		r.say.warn(ctx, "lease could not be released; it expires by itself", "relay", r.cfg.Name, "shard", l.shard, "error", err)
	}
}
