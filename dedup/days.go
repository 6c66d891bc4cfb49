package dedup

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// day is a partition of claims, for a range of IDs.
type day struct {
	name     string // of the table, without its schema
	from, to time.Time
	bytes    int64 // zero: there is no claim
}

// floor returns the smallest UUIDv7 of a point in time. The SQL function uuid_floor computes the
// same.
func floor(at time.Time) string {
	return fmt.Sprintf("%08x-%04x-0000-0000-000000000000", at.UnixMilli()>>16, at.UnixMilli()&0xffff)
}

const untimedFloor = "80000000-0000-0000-0000-000000000000"

// makeAhead creates missing partitions of the coming days. It moves rows of these days out of the
// partition for later times. Without them nothing fails, so it is urgent only when few are left.
func (m *maintenance) makeAhead(ctx context.Context) error {
	var ahead, until time.Time
	if err := m.conn.QueryRow(ctx, m.in(aheadSQL), m.schema, daysAhead).Scan(&ahead, &until); err != nil {
		return err
	}
	if !ahead.Before(until) {
		return nil
	}
	left := daysAhead*24*time.Hour - until.Sub(ahead)
	var made []string
	done, err := m.locked(ctx, left < urgentAhead, func(tx pgx.Tx) error {
		if err := tx.QueryRow(ctx, m.in(aheadSQL), m.schema, daysAhead).Scan(&ahead, &until); err != nil {
			return err
		}
		parent, table := m.in("effectonce.processed_messages"), m.table("ahead")
		if err := do(ctx, tx, "ALTER TABLE %s DETACH PARTITION %s", parent, table); err != nil {
			return err
		}
		for at := ahead.UTC(); at.Before(until); at = at.AddDate(0, 0, 1) {
			name := at.Format("20060102")
			if err := do(ctx, tx, "CREATE TABLE %s PARTITION OF %s FOR VALUES FROM ('%s') TO ('%s')", m.table(name), parent, floor(at), floor(at.AddDate(0, 0, 1))); err != nil {
				return err
			}
			made = append(made, "processed_messages_"+name)
		}
		// Insert into the parent, which routes each row to its day.
		if err := do(ctx, tx, "WITH moved AS (DELETE FROM %s WHERE message_id < '%s' RETURNING *) INSERT INTO %s SELECT * FROM moved", table, floor(until), parent); err != nil {
			return err
		}
		return do(ctx, tx, "ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM ('%s') TO ('%s')", parent, table, floor(until), untimedFloor)
	})
	if done {
		m.report.Made = made
	}
	return err
}

// dropEmpty drops the oldest days, which have been truncated. It extends the partition for older
// IDs over them, so that every ID has a partition. It needs a lock on the whole table, and is not
// urgent.
func (m *maintenance) dropEmpty(ctx context.Context) error {
	days, err := m.empty(ctx, m.conn)
	if err != nil || len(days) == 0 {
		return err
	}
	done, err := m.locked(ctx, len(days) > emptyMax, func(tx pgx.Tx) (err error) {
		// Read again under the lock: no claim can be added now.
		days, err = m.empty(ctx, tx)
		if err != nil || len(days) == 0 {
			return err
		}
		for _, d := range days {
			if err := do(ctx, tx, "DROP TABLE %s", pgx.Identifier{m.schema, d.name}.Sanitize()); err != nil {
				return err
			}
		}
		parent, past, to := m.in("effectonce.processed_messages"), m.table("past"), days[len(days)-1].to
		if err := do(ctx, tx, "ALTER TABLE %s DETACH PARTITION %s", parent, past); err != nil {
			return err
		}
		return do(ctx, tx, "ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (MINVALUE) TO ('%s')", parent, past, floor(to))
	})
	for _, d := range days {
		if done {
			m.report.Dropped = append(m.report.Dropped, d.name)
		}
	}
	return err
}

// empty lists the days that may be dropped: the leading run of old days without claims.
func (m *maintenance) empty(ctx context.Context, db Querier) ([]day, error) {
	days, err := m.behind(ctx, db)
	n := 0
	for n < len(days) && days[n].bytes == 0 {
		n++
	}
	return days[:n], err
}

// behind lists the days whose claims may be deleted: the leading run of days that end at or before
// the horizon.
func (m *maintenance) behind(ctx context.Context, db Querier) ([]day, error) {
	horizon, err := m.horizon(ctx, db)
	if err != nil {
		return nil, err
	}
	all, err := m.days(ctx, db)
	if err != nil {
		return nil, err
	}
	n := 0
	for n < len(all) && horizon != nil && !all[n].to.After(*horizon) {
		n++
	}
	if m.report.HeldBack = ""; slices.ContainsFunc(all[n:], func(d day) bool { return d.bytes > 0 && m.window != nil && !d.to.After(*m.window) }) {
		m.report.HeldBack = m.slowest
	}
	return all[:n], nil
}

// horizon returns the time before which no registered consumer needs its claims. Nil: no time is
// known, so all claims stay.
func (m *maintenance) horizon(ctx context.Context, db Querier) (*time.Time, error) {
	var window, passed *time.Time
	var slowest *string
	if err := db.QueryRow(ctx, m.in(horizonSQL), dropMargin).Scan(&window, &passed, &slowest); err != nil {
		return nil, fmt.Errorf("read windows and positions: %w", err)
	}
	m.window = window
	if window == nil {
		return nil, nil //nolint:nilnil // no horizon
	}
	if slowest != nil && (passed == nil || passed.Before(*window)) {
		m.slowest, window = *slowest, passed
	}
	if window != nil {
		m.report.Horizon = *window
	}
	return window, nil
}

// days lists the daily partitions, the oldest first.
func (m *maintenance) days(ctx context.Context, db Querier) ([]day, error) {
	rows, err := db.Query(ctx, daysSQL, m.schema)
	if err != nil {
		return nil, fmt.Errorf("list partitions: %w", err)
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (day, error) {
		var d day
		var from, to [16]byte
		err := row.Scan(&d.name, &from, &to, &d.bytes)
		d.from, _ = Time(uuid.UUID(from))
		d.to, _ = Time(uuid.UUID(to))
		return d, err
	})
}
