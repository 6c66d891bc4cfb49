package dedup

import (
	"context"
	"fmt"
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

// floor is the smallest UUIDv7 of a point in time, as the SQL function uuid_floor has it.
func floor(at time.Time) string {
	return fmt.Sprintf("%08x-%04x-0000-0000-000000000000", at.UnixMilli()>>16, at.UnixMilli()&0xffff)
}

const untimedFloor = "80000000-0000-0000-0000-000000000000"

// patience with a lock on the whole table, which all claims queue behind.
type patience struct {
	wait      time.Duration // for the lock
	statement time.Duration // with the lock, each
	urgent    bool          // not to get it is an error; else the next run tries again
}

// Without the partitions of coming days nothing fails: what belongs into them lies in the partition for what is
// further ahead, and has to be moved later. So there is time to wait for a quiet moment, until there is not.
func patienceAhead(left time.Duration) patience {
	switch {
	case left < 2*24*time.Hour:
		return patience{5 * time.Second, statementsMax, true}
	case left < 7*24*time.Hour:
		return patience{2 * time.Second, statementsMax, true}
	}
	return patience{100 * time.Millisecond, 5 * time.Second, false}
}

// Empty days of the past cost nothing but their number.
func patienceBehind(empty int) patience {
	if empty > emptyMax {
		return patience{2 * time.Second, statementsMax, true}
	}
	return patience{50 * time.Millisecond, 500 * time.Millisecond, false}
}

// makeAhead makes sure that there is a partition for each of the coming days. What already lies in the
// partition for all that is further ahead moves.
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
	done, err := m.locked(ctx, patienceAhead(left), func(tx pgx.Tx) error {
		if err := tx.QueryRow(ctx, m.in(aheadSQL), m.schema, daysAhead).Scan(&ahead, &until); err != nil {
			return err
		}
		do := func(format string, args ...any) error {
			_, err := tx.Exec(ctx, fmt.Sprintf(format, args...))
			return err
		}
		parent, table := m.in("effectonce.processed_messages"), m.table("ahead")
		if err := do("ALTER TABLE %s DETACH PARTITION %s", parent, table); err != nil {
			return err
		}
		for at := ahead.UTC(); at.Before(until); at = at.AddDate(0, 0, 1) {
			name := at.Format("20060102")
			if err := do("CREATE TABLE %s PARTITION OF %s FOR VALUES FROM ('%s') TO ('%s')", m.table(name), parent, floor(at), floor(at.AddDate(0, 0, 1))); err != nil {
				return err
			}
			made = append(made, "processed_messages_"+name)
		}
		// Into the parent: each row finds its day.
		if err := do("WITH moved AS (DELETE FROM %s WHERE message_id < '%s' RETURNING *) INSERT INTO %s SELECT * FROM moved", table, floor(until), parent); err != nil {
			return err
		}
		return do("ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM ('%s') TO ('%s')", parent, table, floor(until), untimedFloor)
	})
	if done {
		m.report.Made = made
	}
	return err
}

// dropEmpty drops the oldest days, which have been truncated. The partition for what is older grows over them,
// so that there is no ID without a partition. It needs a lock on the whole table, and there is no hurry.
func (m *maintenance) dropEmpty(ctx context.Context) error {
	days, err := m.empty(ctx, m.conn)
	if err != nil || len(days) == 0 {
		return err
	}
	if err := m.renew(ctx); err != nil {
		return err
	}
	done, err := m.locked(ctx, patienceBehind(len(days)), func(tx pgx.Tx) (err error) {
		// Look again: now nothing is claimed.
		days, err = m.empty(ctx, tx)
		if err != nil || len(days) == 0 {
			return err
		}
		// What is noted below would hide what another release dropped.
		if err := m.compareDrops(ctx, tx); err != nil {
			return err
		}
		do := func(format string, args ...any) error {
			_, err := tx.Exec(ctx, fmt.Sprintf(format, args...))
			return err
		}
		for _, d := range days {
			if err := do("DROP TABLE %s", pgx.Identifier{m.schema, d.name}.Sanitize()); err != nil {
				return err
			}
		}
		parent, past, to := m.in("effectonce.processed_messages"), m.table("past"), days[len(days)-1].to
		if err := do("ALTER TABLE %s DETACH PARTITION %s", parent, past); err != nil {
			return err
		}
		if err := do("ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (MINVALUE) TO ('%s')", parent, past, floor(to)); err != nil {
			return err
		}
		return m.noteDropped(ctx, tx, to)
	})
	if done {
		m.report.dropped(days)
	}
	return err
}

func (r *Report) dropped(days []day) {
	r.Dropped = nil
	for _, d := range days {
		r.Dropped = append(r.Dropped, d.name)
	}
}

// empty lists the days that may be dropped: a run of the oldest ones, without a claim.
func (m *maintenance) empty(ctx context.Context, db StatsQuerier) ([]day, error) {
	days, err := m.behind(ctx, db)
	n := 0
	for n < len(days) && days[n].bytes == 0 {
		n++
	}
	return days[:n], err
}

// behind lists the days whose claims may go: a run of the oldest ones.
func (m *maintenance) behind(ctx context.Context, db StatsQuerier) ([]day, error) {
	horizon, err := m.horizon(ctx, db)
	if err != nil || horizon == nil {
		return nil, err
	}
	all, err := m.days(ctx, db)
	if err != nil {
		return nil, err
	}
	n := 0
	for n < len(all) && !all[n].to.After(*horizon) {
		n++
	}
	return all[:n], nil
}

// horizon is up to where no registered consumer needs its claims; nil: none is registered, all stays.
func (m *maintenance) horizon(ctx context.Context, db StatsQuerier) (*time.Time, error) {
	var window, passed *time.Time
	var slowest *string
	if err := db.QueryRow(ctx, m.in(horizonSQL), dropMargin).Scan(&window, &passed, &slowest); err != nil {
		return nil, fmt.Errorf("read windows and positions: %w", err)
	}
	m.report.HeldBack = ""
	if window == nil {
		return nil, nil //nolint:nilnil // stands for: no horizon
	}
	if slowest != nil && (passed == nil || passed.Before(*window)) {
		m.report.HeldBack = *slowest
		window = passed
	}
	if window != nil {
		m.report.Horizon = *window
	}
	return window, nil
}

// days lists the daily partitions, the oldest first.
func (m *maintenance) days(ctx context.Context, db StatsQuerier) ([]day, error) {
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
