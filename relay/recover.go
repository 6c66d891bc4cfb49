package relay

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// ErrOldPrimary is returned by Run and Drain when the database is on an earlier timeline than the
// one that progress was stored on. The database was a primary before a failover, and is still
// written to or read from. Nothing was published. Remedy: connect the relay to the current primary,
// and fence the old one.
var ErrOldPrimary = errors.New("the database is an old primary, from before a failover: connect the relay to the current primary")

// movedFrom reports whether ticks of another cluster mean nothing here. On a later timeline of the same
// one they do: what a snapshot shows was committed in the write-ahead log before its tick, and a server
// that has replayed the tick assigns later transaction ids.
func (c cluster) movedFrom(known cluster) (bool, error) {
	if c.system != nil && known.system != nil && *c.system != *known.system {
		return true, nil
	}
	if c.timeline != nil && known.timeline != nil && *c.timeline < *known.timeline {
		return false, fmt.Errorf("%w (timeline %d, progress knows %d)", ErrOldPrimary, *c.timeline, *known.timeline)
	}
	return false, nil
}

// recover makes progress usable again in another cluster (dump and restore, pg_upgrade) and with
// another number of shards. Transaction ids belong to one cluster, so the stored ticks mean nothing in
// another one. Only the floor is certain: everything up to it is published. Everything above it is published again (duplicates under the same IDs, never a loss).
// Progress becomes a tick in which nothing is visible, and rows with transaction ids of another
// cluster get one of this cluster.
func (r *Relay) recover(ctx context.Context, l *lease, known cluster) (int64, error) {
	r.cfg.Logger.ErrorContext(ctx, "the outbox is in another database cluster than before, or the number of shards was changed: everything above the floor is published again, so consumers will see duplicates",
		"relay", r.cfg.Name, "shard", l.shard, "shards", l.shards, "floor", l.cursor.floor, "system_identifier_before", deref(known.system), "system_identifier", deref(l.cluster.system))
	// Not the first tick, which every database has: progress in Kafka that names it would also
	// match a database that went back.
	begin, err := newTick("1:1:", l.cursor.floor)
	if err != nil {
		return 0, err
	}
	begin.run = l.cluster.run
	if err := r.storeTick(ctx, r.pool, begin); err != nil {
		return 0, err
	}
	err = r.stamp(ctx, l, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, r.sql.of(rebaseSQL), r.cfg.Name, l.shard, l.epoch, begin.id, l.cluster.system, l.cluster.timeline, l.cluster.run,
			l.n+1, l.cursor.floor, l.published)
		if err == nil && tag.RowsAffected() == 0 {
			err = errLeaseLost
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("move progress to this cluster: %w", err)
	}
	l.n++
	l.cursor.seq, l.made = 0, l.epoch
	return begin.id, nil
}

// stamp gives a transaction id of this cluster to the rows of a shard above its floor that have
// none, in the transaction of also. An id that is visible in a snapshot of this cluster is visible
// in all later ones, no matter which session assigned it, so such rows are read as they are. A
// relay needs no more of them. So no relay stamps rows that another relay began with: they would
// get behind the tick that the other relay works on. If two relays begin at once, the second waits,
// and sees what the first has stamped.
func (r *Relay) stamp(ctx context.Context, l *lease, also func(pgx.Tx) error) error {
	return r.transact(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, r.sql.of(lockStampsSQL)); err != nil {
			return err
		}
		if err := also(tx); err != nil {
			return err
		}
		var found bool
		if err := tx.QueryRow(ctx, r.sql.of(foreignSQL), l.cursor.floor, l.shards, l.shard).Scan(&found); err != nil || !found {
			return err
		}
		tag, err := tx.Exec(ctx, r.sql.of(restampSQL), l.cursor.floor, l.shards, l.shard)
		if err != nil {
			return err
		}
		r.cfg.Logger.WarnContext(ctx, "rows of another database cluster get a transaction id of this one, and are published",
			"relay", r.cfg.Name, "shard", l.shard, "floor", l.cursor.floor, "rows", tag.RowsAffected())
		return nil
	})
}

func deref[T any](p *T) any {
	if p == nil {
		return "unknown"
	}
	return *p
}
