package migrations

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/tern/v2/migrate"
)

// DefaultSchema is the schema that holds every table unless another one is configured.
const DefaultSchema = "effectonce"

// Options of Up, To, All, Status and Check. The zero value works.
type Options struct {
	// Schema holds the tables. Default "effectonce". At most 49 bytes of lower-case letters, digits
	// and underscores, not starting with a digit or "pg_".
	Schema string
}

var (
	// ErrTooOld is returned by Check: the database lacks migrations that this program needs, or has
	// no effectonce schema at all. Nothing was changed. Remedy: run "outbox-relay migrate up".
	ErrTooOld = errors.New("database schema is too old")
	// ErrTooNew is returned by Check and Up: the database was migrated by a newer release. Nothing
	// was changed. Remedy: update this program, or migrate down with the newer release.
	ErrTooNew = errors.New("database schema is too new")
)

// Migration is one numbered step, as psql could run it.
type Migration struct {
	Version int
	Name    string
	Up      string
	Down    string
}

// State is what Status reports.
type State struct {
	Schema  string // name of the schema
	Current int    // version of the database; 0: nothing is installed
	Latest  int    // version that this program brings
}

//go:embed *.sql
var files embed.FS

var schemaName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,48}$`)

// Resolve returns the schema name to use, or an error that names the bound. Every package of the
// module that takes a schema passes it through here.
func (o Options) Resolve() (string, error) {
	name := cmp.Or(o.Schema, DefaultSchema)
	if !schemaName.MatchString(name) || strings.HasPrefix(name, "pg_") {
		return "", fmt.Errorf("schema %q: want at most 49 lower-case letters, digits and underscores, not starting with a digit or pg_", name)
	}
	return name, nil
}

var schemaWord = regexp.MustCompile(`\b` + DefaultSchema + `\b`)

// InSchema rewrites statements that are written for the default schema: each word "effectonce" becomes
// the quoted name. The name must come from Resolve.
func InSchema(sql, schema string) string {
	if schema == DefaultSchema {
		return sql
	}
	return schemaWord.ReplaceAllLiteralString(sql, pgx.Identifier{schema}.Sanitize())
}

// All returns the migrations in order, for the schema of opts.
func All(opts Options) ([]Migration, error) {
	schema, err := opts.Resolve()
	if err != nil {
		return nil, err
	}
	names, err := fs.Glob(files, "*.up.sql")
	if err != nil {
		return nil, fmt.Errorf("list migrations: %w", err)
	}
	slices.Sort(names)
	all := make([]Migration, 0, len(names))
	for i, name := range names {
		base := strings.TrimSuffix(name, ".up.sql")
		up, err := files.ReadFile(name)
		if err != nil {
			return nil, fmt.Errorf("read migration %s: %w", name, err)
		}
		down, err := files.ReadFile(base + ".down.sql")
		if err != nil {
			return nil, fmt.Errorf("read migration %s: %w", base, err)
		}
		all = append(all, Migration{
			Version: i + 1, Name: base,
			Up: InSchema(string(up), schema), Down: InSchema(string(down), schema),
		})
	}
	return all, nil
}

// Up brings the database to the latest version, one transaction for each migration. Any number of
// processes may call it at once: an advisory lock lets one work and the others wait, and then they
// find nothing to do. conn must be a connection of its own to the primary, not through a transaction
// pooler (the lock belongs to the session). After an error the database is at the last version that
// succeeded; Up may be called again.
func Up(ctx context.Context, conn *pgx.Conn, opts Options) error {
	all, err := All(opts)
	if err != nil {
		return err
	}
	return To(ctx, conn, opts, len(all))
}

// To migrates up or down to a version; 0 removes everything, including what is not published yet.
func To(ctx context.Context, conn *pgx.Conn, opts Options, version int) error {
	migrator, latest, err := open(ctx, conn, opts)
	if err != nil {
		return err
	}
	if version < 0 || version > latest {
		return fmt.Errorf("migrate to version %d: want 0 to %d", version, latest)
	}
	if err := migrator.MigrateTo(ctx, int32(version)); err != nil {
		var bad migrate.BadVersionError
		if errors.As(err, &bad) {
			return fmt.Errorf("%w: %s; update this program", ErrTooNew, bad.Error())
		}
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

func open(ctx context.Context, conn *pgx.Conn, opts Options) (*migrate.Migrator, int, error) {
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
	for _, m := range all {
		migrator.AppendMigration(m.Name, m.Up, m.Down)
	}
	return migrator, len(all), nil
}

const versionTable = "schema_version"

// Querier is what Status and Check need: a pool, a connection or a transaction.
type Querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Status reads the version of the database without changing anything.
func Status(ctx context.Context, db Querier, opts Options) (State, error) {
	all, err := All(opts)
	if err != nil {
		return State{}, err
	}
	schema, _ := opts.Resolve()
	state := State{Schema: schema, Latest: len(all)}
	sql := InSchema("-- migrations.status\nSELECT version FROM effectonce."+versionTable, schema)
	err = db.QueryRow(ctx, sql).Scan(&state.Current)
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && (pgErr.Code == "42P01" || pgErr.Code == "3F000") || errors.Is(err, pgx.ErrNoRows) {
		return state, nil
	}
	if err != nil {
		return State{}, fmt.Errorf("read the schema version: %w", err)
	}
	return state, nil
}

// Check tells a program at its start whether the database has the schema that it was built for. The
// error is ErrTooOld or ErrTooNew with the remedy in its text, or that of the database.
func Check(ctx context.Context, db Querier, opts Options) error {
	state, err := Status(ctx, db, opts)
	switch {
	case err != nil:
		return err
	case state.Current == 0:
		return fmt.Errorf("%w: schema %s is not installed: run \"outbox-relay migrate up\"", ErrTooOld, state.Schema)
	case state.Current < state.Latest:
		return fmt.Errorf("%w: schema %s has version %d, this program needs %d: run \"outbox-relay migrate up\"",
			ErrTooOld, state.Schema, state.Current, state.Latest)
	case state.Current > state.Latest:
		return fmt.Errorf("%w: schema %s has version %d, this program knows %d: update this program",
			ErrTooNew, state.Schema, state.Current, state.Latest)
	}
	return nil
}
