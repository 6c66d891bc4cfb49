package relay

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// ErrOldPrimary is returned by Run and Drain when the database is on an earlier timeline than progress was stored
// on: it was a primary before a failover, and somebody still writes to it or reads from it. Nothing was published.
// Remedy: connect the relay to the primary of today, and fence the old one.
var ErrOldPrimary = errors.New("the database is an old primary, from before a failover: connect the relay to the primary of today")

// movedFrom tells whether ticks of another cluster, or of an earlier timeline of this one, mean nothing here.
func (c cluster) movedFrom(known cluster) (bool, error) {
	if c.system != nil && known.system != nil && *c.system != *known.system {
		return true, nil
	}
	if c.timeline == nil || known.timeline == nil || *c.timeline == *known.timeline {
		return false, nil
	}
	if *c.timeline < *known.timeline {
		return false, fmt.Errorf("%w (timeline %d, progress knows %d)", ErrOldPrimary, *c.timeline, *known.timeline)
	}
	return true, nil
}

// recover makes progress usable again in another cluster (dump and restore, pg_upgrade), or after a promotion,
// which may have lost commits: transaction ids belong to one cluster and one timeline, so the stored ticks
// mean nothing here. What is certain is the floor: everything up to it is published. Everything above it is
// published again (duplicates under the same IDs, never a loss): it gets a transaction id of this cluster, and
// a new tick from before that transaction becomes the progress.
//
// The snapshot is taken before the transaction has an id. What other transactions of this cluster
// insert meanwhile is either restamped with the rest, or not visible in the new tick; both are read.
func (r *Relay) recover(ctx context.Context, l *lease, known cluster) (int64, error) {
	r.cfg.Logger.ErrorContext(ctx, "the outbox is in another database cluster than before, or behind a failover: everything above the floor is published again, so consumers will see duplicates",
		"relay", r.cfg.Name, "shard", l.shard, "floor", l.cursor.floor, "system_identifier_before", deref(known.system), "system_identifier", deref(l.cluster.system),
		"timeline_before", deref(known.timeline), "timeline", deref(l.cluster.timeline))
	var snapshot string
	if err := r.pool.QueryRow(ctx, snapshotSQL).Scan(&snapshot); err != nil {
		return 0, fmt.Errorf("take a snapshot: %w", err)
	}
	// seqLast is the floor: the restamped rows have new transaction ids and old seqs.
	begin, err := newTick(snapshot, l.cursor.floor)
	if err != nil {
		return 0, err
	}
	begin.run = l.cluster.run
	if err := r.store(ctx, r.pool, begin); err != nil {
		return 0, err
	}
	err = pgx.BeginFunc(ctx, r.pool, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, r.sql.rebase, r.cfg.Name, l.shard, l.epoch, begin.id, l.cluster.system, l.cluster.timeline, l.cluster.run)
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 0 {
			return errLeaseLost
		}
		_, err = tx.Exec(ctx, r.sql.restamp, l.cursor.floor, l.shards, l.shard)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("move progress to this cluster: %w", err)
	}
	return begin.id, nil
}

func deref[T any](p *T) any {
	if p == nil {
		return "unknown"
	}
	return *p
}
