package migrations

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/tern/v2/migrate"
)

// Up brings the database to the latest version, one transaction for each migration. Any number of
// processes may call it at once: an advisory lock lets one work and the others wait, and then they
// find nothing to do. It also finds nothing to do in a database of a newer version that this program
// works with. conn must be a connection of its own to the primary, not through a transaction pooler
// (the lock belongs to the session).
//
// Programs may run meanwhile. A migration that does not get its locks within 1.5 s gives up, so that
// others queue behind it for no longer, logs which transactions hold them, and is tried again after a
// pause, until Options.LockWaitMax. After an error the database is at the last version that succeeded;
// Up may be called again.
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

// To migrates up or down to a version, as Up does; 0 removes everything, including what is not published yet.
func To(ctx context.Context, conn *pgx.Conn, opts Options, version int) error {
	if opts.LockWaitMax < 0 {
		return fmt.Errorf("LockWaitMax %s: want 0 (%s) or more", opts.LockWaitMax, lockWaitDefault)
	}
	wait := &lockWait{
		max:    cmp.Or(opts.LockWaitMax, lockWaitDefault),
		logger: cmp.Or(opts.Logger, slog.Default()), //nolint:forbidigo // a migration that waits is never silent
	}
	migrator, latest, err := open(ctx, conn, opts, wait)
	if err != nil {
		return err
	}
	if version < 0 || version > latest {
		return fmt.Errorf("migrate to version %d: want 0 to %d", version, latest)
	}
	err = wait.retry(ctx, conn, func() error { return migrator.MigrateTo(ctx, int32(version)) })
	var bad migrate.BadVersionError
	if errors.As(err, &bad) {
		return fmt.Errorf("%w: %s; update this program", ErrTooNew, bad.Error())
	}
	if err != nil {
		return fmt.Errorf("migrate to version %d: %w", version, err)
	}
	return nil
}

// createLock keeps ten processes from creating the schema at once: CREATE SCHEMA IF NOT EXISTS is not
// safe against itself.
const createLock = `-- migrations.lock
SELECT pg_advisory_xact_lock(hashtextextended('effectonce migrations', 0))`

// schemaThere spares a role that may not create schemas from being refused where there is nothing to
// create. quote_ident quotes only what needs it (a word of SQL): tern looks for its version table under
// the name as it is given.
const schemaThere = `-- migrations.schema
SELECT quote_ident($1), EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)`

const readOnly = `-- migrations.read_only
SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::bool`

func open(ctx context.Context, conn *pgx.Conn, opts Options, wait *lockWait) (*migrate.Migrator, int, error) {
	all, err := All(opts)
	if err != nil {
		return nil, 0, err
	}
	schema, _ := opts.Resolve()
	var standby bool
	if err := conn.QueryRow(ctx, readOnly).Scan(&standby); err != nil {
		return nil, 0, fmt.Errorf("ask whether the database is read-only: %w", err)
	}
	if standby {
		return nil, 0, errors.New("migrate: the database is read-only (a standby?): connect to the primary")
	}
	var quoted string
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, createLock); err != nil {
			return err
		}
		var there bool
		if err := tx.QueryRow(ctx, schemaThere, schema).Scan(&quoted, &there); err != nil || there {
			return err
		}
		_, err := tx.Exec(ctx, "CREATE SCHEMA "+quoted)
		return err
	})
	if err != nil {
		return nil, 0, fmt.Errorf("create schema %s (the role needs CREATE on the database, or let its owner create the schema): %w", schema, err)
	}
	migrator, err := migrate.NewMigrator(ctx, conn, quoted+"."+versionTable)
	if err != nil {
		return nil, 0, fmt.Errorf("prepare migrations: %w", err)
	}
	wait.schema = schema
	for _, m := range all {
		migrator.Migrations = append(migrator.Migrations, &migrate.Migration{
			Sequence: int32(m.Version), Name: m.Name, UpFunc: wait.step(m.Name, m.Up), DownFunc: wait.step(m.Name, m.Down),
		})
	}
	return migrator, len(all), nil
}
