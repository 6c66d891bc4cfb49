package dedup

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgtype"
)

// sweep deletes claims that cannot be dropped as a day, because their IDs carry no time, or one that is far
// off: those that were made before the window of their consumer. It walks the table in the order of its
// blocks, which needs no index, a part of it in each run.
func (m *maintenance) sweep(ctx context.Context, name string) error {
	var blocks, from int64
	if err := m.conn.QueryRow(ctx, m.in(sweepStateSQL), m.table(name), name).Scan(&blocks, &from); err != nil {
		return err
	}
	if from >= blocks {
		from = 0
	}
	end := min(blocks, from+sweepRunMax)
	for ; from < end; from += sweepBlocks {
		if err := m.renew(ctx); err != nil {
			return err
		}
		first := pgtype.TID{BlockNumber: uint32(from), Valid: true}
		behind := pgtype.TID{BlockNumber: uint32(from + sweepBlocks), Valid: true}
		tag, err := m.conn.Exec(ctx, fmt.Sprintf(m.in(sweepSQL), m.table(name)), first, behind, dropMargin)
		if err != nil {
			return err
		}
		m.report.Swept += tag.RowsAffected()
	}
	_, err := m.conn.Exec(ctx, m.in(sweptSQL), m.epoch, name, from)
	return err
}
