package migrations

import (
	"context"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/pgerr"
)

// LockTimeout is how long a migration waits for the locks of its tables at a time. Other statements
// on these tables, above all claims, queue behind it. It is above deadlock_timeout (1 s by
// default): only a session that has waited that long makes an autovacuum give way, and detects a
// deadlock.
const LockTimeout = 1500 * time.Millisecond

const (
	lockWaitDefault = 5 * time.Minute
	restTimeout     = 100 * time.Millisecond // for a lock that a statement needs after those of the tables
	pauseMin        = time.Second            // queued statements run now
	pauseMax        = 10 * time.Second
	holdersMax      = 3
)

// lockWait runs migrations with short lock waits and retries.
type lockWait struct {
	schema string
	max    time.Duration
	logger *slog.Logger

	// Of the last step: its name, when it began, and since when, by the database's clock, it
	// waited.
	name    string
	started time.Time
	since   time.Time
}

// locked finds the tables whose definition a migration changes. Tables that it only reads or writes
// are locked by their statements.
var locked = regexp.MustCompile(`(?:ALTER TABLE|DROP TABLE|\bON)(?: IF EXISTS| ONLY)* (?:effectonce|"[a-z0-9_]+")\.([a-z0-9_]+)`)

// lockedTables removes the tables that the migration itself will create, and keeps the order of the
// migration.
const lockedTables = `-- migrations.tables
SELECT c.oid::regclass::text FROM pg_catalog.unnest($2::text[]) WITH ORDINALITY AS n (name, place)
JOIN pg_class c ON c.relname = n.name AND c.relkind IN ('r', 'p') JOIN pg_namespace s ON s.oid = c.relnamespace
WHERE s.nspname = $1 GROUP BY c.oid ORDER BY pg_catalog.min(n.place)`

// schemaTables are all tables. A lock of a partitioned one includes its partitions.
const schemaTables = `-- migrations.schema_tables
SELECT c.oid::regclass::text FROM pg_class c JOIN pg_namespace s ON s.oid = c.relnamespace
WHERE s.nspname = $1::text AND c.relkind IN ('r', 'p') AND NOT c.relispartition ORDER BY c.oid`

// setTimeout applies to the rest of the transaction.
const setTimeout = `-- migrations.lock_timeout
SELECT clock_timestamp(), set_config('lock_timeout', $1, true)`

// ownVersion takes a lock that only the owner of the table can take: other roles may only read it.
const ownVersion = `-- migrations.version
SELECT version FROM effectonce.` + versionTable + ` FOR UPDATE`

// begin starts the time within which the transaction must get its locks.
func (w *lockWait) begin(ctx context.Context, tx pgx.Tx) error {
	w.started = time.Now()
	return w.within(ctx, tx, 0)
}

func (w *lockWait) within(ctx context.Context, tx pgx.Tx, lowest time.Duration) error {
	left := max(LockTimeout-time.Since(w.started), lowest)
	return tx.QueryRow(ctx, setTimeout, fmt.Sprintf("%dms", left.Milliseconds())).Scan(&w.since, nil)
}

// apply runs a migration. It takes the locks of all its tables first, within one LockTimeout.
// Otherwise each statement could wait for its lock while those of the earlier ones are held, and
// others would wait for one timeout per table.
//
// All other tables get a lock that neither claims nor any other writes wait for, but CREATE TRIGGER
// does: no role adds a trigger between the check, which runs under these locks, and the migration.
func (w *lockWait) apply(ctx context.Context, tx pgx.Tx, name, sql string, check func() error) error {
	w.name = name
	var names []string
	for _, match := range locked.FindAllStringSubmatch(sql, -1) {
		names = append(names, match[1])
	}
	if err := w.lock(ctx, tx, "ACCESS EXCLUSIVE", lockedTables, w.schema, names); err != nil {
		return err
	}
	if err := w.lock(ctx, tx, "ROW EXCLUSIVE", schemaTables, w.schema); err != nil {
		return err
	}
	if err := check(); err != nil {
		return err
	}
	if err := w.within(ctx, tx, restTimeout); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, sql) // without arguments: several statements at once
	return err
}

// lock takes the locks of the tables that a query lists, one after another, in what is left of the
// LockTimeout.
func (w *lockWait) lock(ctx context.Context, tx pgx.Tx, mode, list string, args ...any) error {
	rows, err := tx.Query(ctx, list, args...)
	if err != nil {
		return err
	}
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	for _, table := range tables {
		if err := w.within(ctx, tx, time.Millisecond); err != nil { // 0 would be no timeout
			return err
		}
		if _, err := tx.Exec(ctx, "LOCK TABLE "+table+" IN "+mode+" MODE"); err != nil {
			return err
		}
	}
	return nil
}

// retry runs a step until it succeeds, or fails for a reason other than a lock. Completed
// migrations stay: each is its own transaction.
func (w *lockWait) retry(ctx context.Context, conn *pgx.Conn, run func() error) error {
	begun, pause := time.Now(), pauseMin
	for {
		err := run()
		if !pgerr.LockConflict(err) {
			return err
		}
		holders := w.holders(ctx, conn)
		waited := time.Since(begun)
		if waited+pause > w.max {
			return fmt.Errorf("gave up after %s: waited for a lock held by %s: %w", waited.Round(time.Second), holders, err)
		}
		w.logger.WarnContext(ctx, "migration waits for a lock; other programs continue", "migration", w.name, "held_by", holders,
			"waited", waited.Round(time.Second), "gives_up_after", w.max, "next_try_in", pause)
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("%w: waited for a lock held by %s: %w", ctx.Err(), holders, err)
		}
		pause = min(2*pause, pauseMax)
	}
}

// holdersSQL finds the sessions that hold locks on the schema's tables in a transaction that began
// before the migration requested the lock that it did not get, the oldest first. A session of
// another role may hide its start time. A prepared transaction has no session.
const holdersSQL = `-- migrations.holders
SELECT pg_catalog.format('%s (%s)', coalesce('pid ' || l.pid, 'a prepared transaction, see pg_prepared_xacts'), pg_catalog.concat_ws(', ', nullif(a.application_name, ''),
  'role ' || a.usename, a.state, 'transaction of ' || pg_catalog.date_trunc('second', clock_timestamp() - a.xact_start), 'on ' || pg_catalog.string_agg(DISTINCT c.relname, ', ')))
FROM pg_locks l JOIN pg_class c ON c.oid = l.relation JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'relation' AND l.granted AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND n.nspname = $1 AND c.relkind IN ('r', 'p') AND l.pid IS DISTINCT FROM pg_backend_pid() AND coalesce(a.xact_start < $2, true)
GROUP BY l.pid, l.virtualtransaction, a.application_name, a.usename, a.state, a.xact_start
ORDER BY a.xact_start LIMIT $3`

// holders describes the lock holders for people. Its failure does not affect the migration.
func (w *lockWait) holders(ctx context.Context, conn *pgx.Conn) string {
	rows, err := conn.Query(ctx, holdersSQL, w.schema, w.since, holdersMax)
	if err == nil {
		var found []string
		if found, err = pgx.CollectRows(rows, pgx.RowTo[string]); err == nil && len(found) > 0 {
			return strings.Join(found, "; ")
		}
	}
	return "a transaction that has since ended, or is not visible to this role"
}
