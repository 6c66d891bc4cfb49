package dedup

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// sweep deletes claims that cannot be forgotten as a day, because their IDs carry no time, or a
// time that is far away. It deletes those that were made before the window of their consumer. It
// reads the table in block order, which needs no index and no lock on the table, and a part of it
// in each run.
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
		if err := m.sweepBlocks(ctx, name, from); err != nil {
			return err
		}
	}
	_, err := m.conn.Exec(ctx, m.in(sweptSQL), m.epoch, name, from)
	return err
}

// sweepBlocks is one transaction, which deletes claims and moves the marks of their consumers. It
// waits only briefly for locks of these rows, because claims of the same messages wait for the end
// of the transaction.
func (m *maintenance) sweepBlocks(ctx context.Context, name string, from int64) error {
	var swept int64
	err := m.limited(ctx, lockWaitMax, statementsMax, func(tx pgx.Tx) error {
		first := pgtype.TID{BlockNumber: uint32(from), Valid: true}
		behind := pgtype.TID{BlockNumber: uint32(from + sweepBlocks), Valid: true}
		return tx.QueryRow(ctx, fmt.Sprintf(m.in(sweepSQL), m.table(name)), first, behind, dropMargin).Scan(&swept)
	})
	if err == nil {
		m.report.Swept += swept
	}
	return err
}
