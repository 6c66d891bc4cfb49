package dedup

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/pgerr"
)

// forgetDays truncates the days whose claims are no longer needed, each in its own transaction. It
// locks only that day, so claims of other days are not affected. A truncated day can get claims
// again, of messages that are late or replayed. The same rule truncates it again.
func (m *maintenance) forgetDays(ctx context.Context) error {
	days, err := m.behind(ctx, m.conn)
	if err != nil {
		return err
	}
	var failed error
	for _, d := range days {
		if d.bytes == 0 {
			continue
		}
		if err := m.forgetDay(ctx, d); err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", d.name, err))
			if !pgerr.LockConflict(err) {
				return failed
			}
		}
	}
	return failed
}

// forgetDay truncates a day and moves the marks of the consumers that had claims in it.
func (m *maintenance) forgetDay(ctx context.Context, d day) error {
	table := pgx.Identifier{m.schema, d.name}.Sanitize()
	truncated := false
	err := m.limited(ctx, lockWaitMax, statementsMax, func(tx pgx.Tx) error {
		// No claim is added from here on. Readers do not wait yet: the comparison of fingerprints reads
		// the partitions of all days.
		if _, err := tx.Exec(ctx, "LOCK TABLE ONLY "+table+" IN SHARE ROW EXCLUSIVE MODE"); err != nil {
			return err
		}
		horizon, err := m.horizon(ctx, tx)
		if err != nil || horizon == nil || d.to.After(*horizon) {
			return err // since the first read, a consumer registered or a position was set back
		}
		holders, err := m.holders(ctx, tx, table)
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "LOCK TABLE ONLY "+table+" IN ACCESS EXCLUSIVE MODE"); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, m.in(markSQL), d.to, holders); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, "TRUNCATE ONLY "+table)
		truncated = err == nil
		return err
	})
	if err == nil && truncated {
		m.report.Truncated = append(m.report.Truncated, d.name)
	}
	return err
}

// holders lists the consumers that have claims in a day, under its lock: an empty list, not nil, for none. It
// returns nil if that takes longer than claims of that day may wait; then all consumers that forget claims
// count as holders.
func (m *maintenance) holders(ctx context.Context, tx pgx.Tx, table string) (ids []int32, err error) {
	err = pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { // a savepoint
		if _, err := tx.Exec(ctx, m.in(lockSettingsSQL), millis(lockWaitMax), millis(m.lookMax), millis(lockIdleMax)); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, fmt.Sprintf(m.in(holdersSQL), table))
		if err != nil {
			return err
		}
		ids, err = pgx.AppendRows([]int32{}, rows, pgx.RowTo[int32])
		return err
	})
	if pgerr.Is(err, pgerr.QueryCanceled) && ctx.Err() == nil {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	_, err = tx.Exec(ctx, m.in(lockSettingsSQL), millis(lockWaitMax), millis(statementsMax), millis(lockIdleMax))
	return ids, err
}
