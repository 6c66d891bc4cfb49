package relay

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// recover makes progress usable again in another cluster (dump and restore, pg_upgrade): transaction
// ids belong to one cluster, so the stored ticks mean nothing here. What is certain is the floor:
// everything up to it is published. Everything above it is published again (duplicates under the same
// IDs, never a loss): it gets a transaction id of this cluster, and a new tick from before that
// transaction becomes the progress.
//
// The snapshot is taken before the transaction has an id. What other transactions of this cluster
// insert meanwhile is either restamped with the rest, or not visible in the new tick; both are read.
func (r *Relay) recover(ctx context.Context, l *lease, known, system int64) (int64, error) {
	r.cfg.Logger.ErrorContext(ctx, "the outbox is in another database cluster than before: everything above the floor is published again, so consumers will see duplicates",
		"relay", r.cfg.Name, "floor", l.cursor.floor, "system_identifier_before", known, "system_identifier", system)
	var snapshot string
	if err := r.pool.QueryRow(ctx, `-- relay.recover_snapshot
SELECT pg_current_snapshot()::text`).Scan(&snapshot); err != nil {
		return 0, fmt.Errorf("take a snapshot: %w", err)
	}
	// seqLast is the floor: the restamped rows have new transaction ids and old seqs.
	begin, err := newTick(snapshot, l.cursor.floor)
	if err != nil {
		return 0, err
	}
	err = pgx.BeginFunc(ctx, r.pool, func(tx pgx.Tx) error {
		if err := r.store(ctx, tx, begin); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, r.sql.rebase, r.cfg.Name, shardAll, l.epoch, begin.id, system)
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 0 {
			return errLeaseLost
		}
		_, err = tx.Exec(ctx, r.sql.restamp, l.cursor.floor)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("move progress to this cluster: %w", err)
	}
	return begin.id, nil
}
