package migrations

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/pgerr"
)

// Up migrates the database to the latest version, with one transaction for each migration. Any
// number of processes may call it at once: one works under the lock of the row that holds the
// version; the others wait, and then find nothing to do. Up also does nothing in a database of a
// newer version that this program works with. conn must be a dedicated connection to the primary,
// not through a transaction pooler. Up works under its own search path, and restores that of the
// connection.
//
// Up refuses a schema that it cannot trust with ErrNotOurs, also if there is nothing to do: code in
// that schema would run with the rights of Up's role. A program whose role does not own the schema
// calls Check.
//
// Programs may run during a migration. A migration that does not get its locks within 1.5 s gives
// up, so that others queue behind it for no longer. It logs which transactions hold the locks, and
// is retried after a pause, until Options.LockWaitMax. After an error the database is at the last
// version that succeeded; Up may be called again.
func Up(ctx context.Context, conn *pgx.Conn, opts Options) error {
	all, err := All(opts)
	if err != nil {
		return err
	}
	err = To(ctx, conn, opts, len(all))
	if errors.Is(err, ErrTooNew) {
		if state, statusErr := Status(ctx, conn, opts); statusErr == nil && state.Compatible() {
			return nil
		}
	}
	return err
}

// To migrates up or down to a version, as Up does. Version 0 removes everything, including messages
// that are not published yet.
func To(ctx context.Context, conn *pgx.Conn, opts Options, version int) error {
	if opts.LockWaitMax < 0 {
		return fmt.Errorf("LockWaitMax %s: want 0 (%s) or more", opts.LockWaitMax, lockWaitDefault)
	}
	all, err := All(opts)
	if err != nil {
		return err
	}
	if version < 0 || version > len(all) {
		return fmt.Errorf("migrate to version %d: want 0 to %d", version, len(all))
	}
	schema, _ := opts.Resolve()
	restore, err := safePath(ctx, conn)
	if err != nil {
		return err
	}
	defer restore()
	var standby bool
	if err := conn.QueryRow(ctx, readOnly).Scan(&standby); err != nil {
		return fmt.Errorf("check whether the database is read-only: %w", err)
	}
	if standby {
		return errors.New("migrate: the database is read-only (a standby?): connect to the primary")
	}
	m := migrator{schema: schema, all: all, to: version, wait: &lockWait{
		schema: schema,
		max:    cmp.Or(opts.LockWaitMax, lockWaitDefault),
		logger: cmp.Or(opts.Logger, slog.Default()), //nolint:forbidigo // a migration that waits always logs
	}}
	if err := m.migrate(ctx, conn); err != nil {
		return fmt.Errorf("migrate to version %d: %w", version, err)
	}
	return nil
}

const (
	readOnly = `-- migrations.read_only
SELECT pg_is_in_recovery() OR pg_catalog.current_setting('transaction_read_only')::bool`

	// The first two are commands: they look up no function.
	askPath  = "-- migrations.ask_path\nSHOW search_path"
	setPath  = "-- migrations.set_path\nSET search_path = pg_catalog, pg_temp"
	givePath = `-- migrations.give_path
SELECT pg_catalog.set_config('search_path', $1::text, false)`

	pathMax = 5 * time.Second
)

// safePath keeps functions and operators of other roles out of the session: PostgreSQL prefers one
// of any schema in the search path if its argument types fit better than those of its own. restore
// sets the caller's path again.
func safePath(ctx context.Context, conn *pgx.Conn) (restore func(), err error) {
	var path string
	if err := conn.QueryRow(ctx, askPath, pgx.QueryExecModeSimpleProtocol).Scan(&path); err != nil {
		return nil, fmt.Errorf("read the search path: %w", err)
	}
	if _, err := conn.Exec(ctx, setPath); err != nil {
		return nil, fmt.Errorf("set the search path: %w", err)
	}
	return func() {
		if conn.IsClosed() {
			return
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pathMax)
		defer cancel()
		if _, err := conn.Exec(ctx, givePath, path); err != nil {
			_ = conn.Close(ctx) // do not return a connection with another search path
		}
	}, nil
}

// migrator migrates one schema to one version.
type migrator struct {
	schema string
	all    []Migration
	to     int
	wait   *lockWait
}

// migrate creates the schema if necessary, and then runs one step after another. Each step decides
// under the lock of the version's row which migration is next.
func (m *migrator) migrate(ctx context.Context, conn *pgx.Conn) error {
	current, err := m.begin(ctx, conn)
	for err == nil && current != m.to {
		err = m.wait.retry(ctx, conn, func() (err error) {
			current, err = m.step(ctx, conn)
			return err
		})
	}
	return err
}

// begin reads the version, and creates the schema and its version table if they do not exist.
func (m *migrator) begin(ctx context.Context, conn *pgx.Conn) (current int, err error) {
	for range beginTries {
		current, err = m.install(ctx, conn)
		// Another process created it at the same time: two concurrent IF NOT EXISTS can also
		// conflict.
		if !pgerr.Is(err, pgerr.DuplicateSchema, pgerr.DuplicateTable, pgerr.DuplicateObject, pgerr.UniqueViolation) {
			return current, err
		}
	}
	return current, err
}

const (
	beginTries = 5

	versionTableThere = `-- migrations.version_table
SELECT count(*) > 0 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = $1::text AND c.relname = '` + versionTable + "'"

	readVersion = `-- migrations.read_version
SELECT version FROM effectonce.` + versionTable

	makeVersion = `CREATE TABLE effectonce.` + versionTable + ` (version int4 NOT NULL);
INSERT INTO effectonce.` + versionTable + ` (version) VALUES (0)`

	writeVersion = `-- migrations.write_version
UPDATE effectonce.` + versionTable + ` SET version = $1::int4`
)

// install reads with one snapshot. With several, tables of a migration that another process commits
// in between would look like tables that no migration made.
func (m *migrator) install(ctx context.Context, conn *pgx.Conn) (current int, err error) {
	err = pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
		var there, table bool
		if err := tx.QueryRow(ctx, schemaThere, m.schema).Scan(&there); err != nil {
			return fmt.Errorf("look for schema %s: %w", m.schema, err)
		}
		if !there {
			if _, err := tx.Exec(ctx, "CREATE SCHEMA "+quote(m.schema)); err != nil {
				return fmt.Errorf("create schema %s (the role needs CREATE on the database, or let its owner create the schema): %w", m.schema, err)
			}
		}
		if err := tx.QueryRow(ctx, versionTableThere, m.schema).Scan(&table); err != nil {
			return fmt.Errorf("look for the version table: %w", err)
		}
		// The version is read only from a table that is ours: a view would run its owner's functions.
		if err := trusted(ctx, tx, m.schema, -1); err != nil {
			return err
		}
		if table {
			if err := tx.QueryRow(ctx, InSchema(readVersion, m.schema)).Scan(&current); err != nil {
				return fmt.Errorf("read the schema version: %w", err)
			}
			if current == m.to {
				return nil // this needs only SELECT on the version table
			}
		}
		if err := trusted(ctx, tx, m.schema, current); err != nil || table {
			return err
		}
		_, err := tx.Exec(ctx, InSchema(makeVersion, m.schema))
		return err
	})
	return current, err
}

// committed sets the isolation level, because a role may have another default. At a higher level, a
// query after a lock would see the state before the lock.
func committed() pgx.TxOptions {
	return pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}
}

// schemaThere is queried first so that a role without the right to create schemas is not refused if
// the schema exists.
const schemaThere = `-- migrations.schema
SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1::text)`

func quote(name string) string { return pgx.Identifier{name}.Sanitize() }

// step runs the next migration in one transaction and returns the resulting version. It checks for
// untrusted objects again after it has the locks of all tables: it sees what others did before, and
// what they do later waits.
func (m *migrator) step(ctx context.Context, conn *pgx.Conn) (current int, err error) {
	err = pgx.BeginTxFunc(ctx, conn, committed(), func(tx pgx.Tx) error {
		if err := m.wait.begin(ctx, tx); err != nil {
			return err
		}
		if err := tx.QueryRow(ctx, InSchema(ownVersion, m.schema)).Scan(&current); err != nil {
			return fmt.Errorf("lock the schema version: %w", err)
		}
		if current > len(m.all) {
			return State{Schema: m.schema, Current: current, Latest: len(m.all)}.tooNew()
		}
		if current == m.to {
			return nil // another process did it
		}
		check := func() error { return trusted(ctx, tx, m.schema, current) }
		if err := check(); err != nil { // before locks that a role may take only on its own tables
			return err
		}
		var migration Migration
		var sql string
		var next int
		if current < m.to {
			migration, next = m.all[current], current+1
			sql = migration.Up
		} else {
			migration, next = m.all[current-1], current-1
			sql = migration.Down
		}
		if err := m.wait.apply(ctx, tx, migration.Name, sql, check); err != nil {
			return fmt.Errorf("%s: %w", migration.Name, err)
		}
		if _, err := tx.Exec(ctx, InSchema(writeVersion, m.schema), next); err != nil {
			return fmt.Errorf("%s: write the schema version: %w", migration.Name, err)
		}
		current = next
		return nil
	})
	return current, err
}
