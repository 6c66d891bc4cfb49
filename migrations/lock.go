package migrations

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/tern/v2/migrate"
)

// LockTimeout is how long a migration waits for the locks of its tables at a time. Whatever wants these
// tables meanwhile, claims above all, queues behind it. It is above deadlock_timeout (1 s by default):
// only a waiter that has waited for that long makes an autovacuum give way, and learns of a deadlock.
const LockTimeout = 1500 * time.Millisecond

const (
	lockWaitDefault = 5 * time.Minute
	restTimeout     = 100 * time.Millisecond // for a lock of a statement behind those of the tables
	pauseMin        = time.Second            // what queued has its turn
	pauseMax        = 10 * time.Second
	holdersMax      = 3
)

// lockWait runs migrations so that they wait for locks for a short time only, and again and again.
type lockWait struct {
	schema string
	max    time.Duration
	logger *slog.Logger

	// Of the last step: what it is, and since when by the database's clock it waited.
	name  string
	since time.Time
}

// locked finds the tables whose definition a migration changes. Others it only reads or writes; these
// wait at their statement.
var locked = regexp.MustCompile(`(?:ALTER TABLE|DROP TABLE|\bON)(?: IF EXISTS| ONLY)* (?:effectonce|"[a-z0-9_]+")\.([a-z0-9_]+)`)

// lockedTables drops what the migration is about to make, in the order of the migration.
const lockedTables = `-- migrations.tables
SELECT c.oid::regclass::text FROM unnest($2::text[]) WITH ORDINALITY AS n (name, place)
JOIN pg_class c ON c.relname = n.name AND c.relkind IN ('r', 'p') JOIN pg_namespace s ON s.oid = c.relnamespace
WHERE s.nspname = $1 GROUP BY c.oid ORDER BY min(n.place)`

// setTimeout is for the rest of the transaction, or until the migrator's RESET ALL.
const setTimeout = `-- migrations.lock_timeout
SELECT clock_timestamp(), set_config('lock_timeout', $1, true)`

// ownVersion: the migrator's update of this row, which comes last and without a timeout, does not wait.
const ownVersion = `-- migrations.version
SELECT version FROM effectonce.` + versionTable + ` FOR UPDATE`

// step is a migration. It takes the locks of all its tables first, within one LockTimeout: a statement for
// which the locks of those before it were held could make all others wait for as many timeouts as there
// are tables.
func (w *lockWait) step(name, sql string) migrate.MigrationFunc {
	return func(ctx context.Context, conn *pgx.Conn) error {
		w.name = name
		if err := w.lock(ctx, conn, sql); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if _, err := conn.Exec(ctx, sql); err != nil { // without arguments: several statements at once
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	}
}

func (w *lockWait) lock(ctx context.Context, conn *pgx.Conn, sql string) error {
	start := time.Now()
	within := func(lowest time.Duration) error {
		left := max(LockTimeout-time.Since(start), lowest)
		return conn.QueryRow(ctx, setTimeout, fmt.Sprintf("%dms", left.Milliseconds())).Scan(&w.since, nil)
	}
	if err := within(0); err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, InSchema(ownVersion, w.schema)); err != nil {
		return err
	}
	var names []string
	for _, match := range locked.FindAllStringSubmatch(sql, -1) {
		names = append(names, match[1])
	}
	rows, err := conn.Query(ctx, lockedTables, w.schema, names)
	if err != nil {
		return err
	}
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	for _, table := range tables {
		if err := within(time.Millisecond); err != nil { // 0 would be no timeout
			return err
		}
		if _, err := conn.Exec(ctx, "LOCK TABLE "+table+" IN ACCESS EXCLUSIVE MODE"); err != nil {
			return err
		}
	}
	return within(restTimeout)
}

// retry runs the migrator until it fails for another reason than a lock. What is done stays done: each
// migration is a transaction of its own.
func (w *lockWait) retry(ctx context.Context, conn *pgx.Conn, run func() error) error {
	begun, pause := time.Now(), pauseMin
	for {
		err := run()
		if !lockTrouble(err) {
			return err
		}
		holders := w.holders(ctx, conn)
		waited := time.Since(begun)
		if waited+pause > w.max {
			return fmt.Errorf("gave up after %s: waited for a lock held by %s: %w", waited.Round(time.Second), holders, err)
		}
		w.logger.WarnContext(ctx, "migration waits for a lock, other programs go on", "migration", w.name, "held_by", holders,
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

func lockTrouble(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && (pgErr.Code == "55P03" || pgErr.Code == "40P01")
}

// holdersSQL finds who has locks on the schema's tables in a transaction that began before the migration asked
// for the lock that it did not get, the oldest first. A session of another role may hide when it began. A
// prepared transaction has no session.
const holdersSQL = `-- migrations.holders
SELECT format('%s (%s)', coalesce('pid ' || l.pid, 'a prepared transaction, see pg_prepared_xacts'), concat_ws(', ', nullif(a.application_name, ''),
  'role ' || a.usename, a.state, 'transaction of ' || date_trunc('second', clock_timestamp() - a.xact_start), 'on ' || string_agg(DISTINCT c.relname, ', ')))
FROM pg_locks l JOIN pg_class c ON c.oid = l.relation JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'relation' AND l.granted AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND n.nspname = $1 AND c.relkind IN ('r', 'p') AND l.pid IS DISTINCT FROM pg_backend_pid() AND coalesce(a.xact_start < $2, true)
GROUP BY l.pid, l.virtualtransaction, a.application_name, a.usename, a.state, a.xact_start
ORDER BY a.xact_start LIMIT $3`

// holders is for people: what it cannot find out does not matter to the migration.
func (w *lockWait) holders(ctx context.Context, conn *pgx.Conn) string {
	rows, err := conn.Query(ctx, holdersSQL, w.schema, w.since, holdersMax)
	if err == nil {
		var found []string
		if found, err = pgx.CollectRows(rows, pgx.RowTo[string]); err == nil && len(found) > 0 {
			return strings.Join(found, "; ")
		}
	}
	return "a transaction that has ended meanwhile, or cannot be seen"
}
