package relay

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

// lease is the right to publish, until the database's clock passes its end. Its epoch is in every write
// of progress, so a holder that lost it cannot store anything.
type lease struct {
	epoch  int64
	cursor cursor
	// seq was the last one given out before the statement that took the lease: see publisher.seqSafe.
	seq int64
	// trusted is when this process stops believing in its lease, by its own monotonic clock: counted
	// from before the statement that took or renewed it, and a tenth early, so it ends before the
	// database's does. A process that was frozen finds it over when it wakes.
	trusted atomic.Pointer[time.Time]
}

func (l *lease) trust(asked time.Time, length time.Duration) {
	until := asked.Add(length - length/10)
	l.trusted.Store(&until)
}

func (l *lease) held() bool { return time.Now().Before(*l.trusted.Load()) }

// acquire returns nil while another replica holds the lease.
func (r *Relay) acquire(ctx context.Context) (*lease, error) {
	var system *int64
	if err := r.pool.QueryRow(ctx, systemSQL).Scan(&system); err != nil {
		// Some hosted databases do not show it; then a move to another cluster cannot be noticed.
		r.cfg.Logger.WarnContext(ctx, "system identifier unknown: a restore into another cluster will not be noticed", "error", err)
	}
	l := &lease{}
	if err := r.pool.QueryRow(ctx, r.sql.seq).Scan(&l.seq); err != nil {
		return nil, fmt.Errorf("read the outbox's sequence: %w", err)
	}
	asked := time.Now()
	var from int64
	var to, known *int64
	err := r.pool.QueryRow(ctx, r.sql.acquire, r.cfg.Name, shardAll, r.cfg.Owner, r.cfg.Lease, system).
		Scan(&l.epoch, &from, &to, &l.cursor.seq, &l.cursor.floor, &known)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil //nolint:nilnil // no lease is no error
	}
	if err != nil {
		return nil, fmt.Errorf("take the lease: %w", err)
	}
	l.trust(asked, r.cfg.Lease)
	if system != nil && known != nil && *system != *known {
		if from, err = r.recover(ctx, l, *known, *system); err != nil {
			return nil, err
		}
		to, l.cursor.seq = nil, 0
	}
	if l.cursor.from, err = r.loadTick(ctx, r.pool, from); err != nil {
		return nil, err
	}
	if to != nil {
		if l.cursor.to, err = r.loadTick(ctx, r.pool, *to); err != nil {
			return nil, err
		}
	}
	return l, nil
}

// keepLease renews the lease until ctx ends, and returns errLeaseLost as soon as it is not certain any
// more that it is held: after a refused renewal, or when no renewal succeeded in time.
func (r *Relay) keepLease(ctx context.Context, l *lease) error {
	for {
		if !pause(ctx, r.cfg.Lease/3) {
			return nil
		}
		if !l.held() {
			// Frozen or cut off for longer than the lease: somebody else may publish by now.
			return errLeaseLost
		}
		asked := time.Now()
		attempt, cancel := context.WithDeadline(ctx, *l.trusted.Load())
		tag, err := r.pool.Exec(attempt, r.sql.renew, r.cfg.Name, shardAll, l.epoch, r.cfg.Lease)
		cancel()
		switch {
		case err != nil:
			if ctx.Err() == nil {
				r.cfg.Logger.WarnContext(ctx, "lease could not be renewed", "relay", r.cfg.Name, "error", err)
			}
		case tag.RowsAffected() == 0:
			return errLeaseLost
		default:
			l.trust(asked, r.cfg.Lease)
			if _, err := r.pool.Exec(ctx, r.sql.prune); err != nil && ctx.Err() == nil {
				r.cfg.Logger.WarnContext(ctx, "old ticks could not be removed", "error", err)
			}
		}
	}
}

// giveBack ends the lease early. Failure only costs the others the rest of it.
func (r *Relay) giveBack(ctx context.Context, l *lease) {
	if _, err := r.pool.Exec(ctx, r.sql.release, r.cfg.Name, shardAll, l.epoch); err != nil {
		r.cfg.Logger.WarnContext(ctx, "lease could not be given back; it runs out by itself", "relay", r.cfg.Name, "error", err)
	}
}
