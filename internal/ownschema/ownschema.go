// Package ownschema gives an example or a demo a schema that it created itself. Databases that
// users provide for a trial contain tables that must survive it. A schema that does not have the
// mark of its maker is left as it is, and refused.
package ownschema

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/migrations"
)

// ErrNotOwn means that a schema of the wanted name exists without the caller's mark. Nothing was
// changed.
var ErrNotOwn = errors.New("its tables are not touched")

// lockSQL keeps programs that share a database from creating the tables at once: IF NOT EXISTS is
// not safe against itself. Only the owner of the tables can take this lock.
const lockSQL = `-- ownschema.lock
SELECT FROM effectonce.schema_version FOR UPDATE`

const lookSQL = `-- ownschema.look
SELECT coalesce(pg_catalog.obj_description(oid, 'pg_namespace'), '') FROM pg_catalog.pg_namespace WHERE nspname = $1`

// mark is the comment of a schema that maker created.
func mark(maker string) string {
	return "made by " + maker + " of effectonce, which may empty or drop it"
}

// Make creates a schema and marks it. It accepts an existing schema if this maker marked it; that
// schema may contain what an earlier run left.
func Make(ctx context.Context, conn *pgx.Conn, schema, maker string) error {
	err := MakeNew(ctx, conn, schema, maker)
	if !errors.Is(err, ErrNotOwn) {
		return err
	}
	var comment string
	if err := conn.QueryRow(ctx, lookSQL, schema).Scan(&comment); err != nil {
		return fmt.Errorf("look for schema %s: %w", schema, err)
	}
	if comment == mark(maker) {
		return nil
	}
	return fmt.Errorf("schema %s exists and %s did not create it: %w; use another database, or rename the schema: ALTER SCHEMA %s RENAME TO …",
		schema, maker, ErrNotOwn, quote(schema))
}

// MakeNew creates a schema that must not exist yet, so that its maker may drop it.
func MakeNew(ctx context.Context, conn *pgx.Conn, schema, maker string) error {
	// COMMENT takes no parameters; the mark has no quotes. Both statements are one transaction.
	_, err := conn.Exec(ctx, "CREATE SCHEMA "+quote(schema)+"; COMMENT ON SCHEMA "+quote(schema)+" IS '"+mark(maker)+"'", pgx.QueryExecModeSimpleProtocol)
	switch {
	case pgerr.Is(err, pgerr.DuplicateSchema, pgerr.UniqueViolation): // it was there, or another program has just committed it
		return fmt.Errorf("schema %s already exists, and this run did not create it: %w", schema, ErrNotOwn)
	case err != nil:
		return fmt.Errorf("create schema %s: %w", schema, err)
	}
	return nil
}

func quote(name string) string { return pgx.Identifier{name}.Sanitize() }

// Open creates the schema with the tables of effectonce and those of the SQL text, and returns what
// Connect returns. In production a step of the deployment (outbox-relay migrate up) creates the
// tables of effectonce, in a schema of their own.
func Open(ctx context.Context, url, schema, maker, tables string) (*pgxpool.Pool, error) {
	pool, err := Connect(ctx, url, schema)
	if err != nil {
		return nil, err
	}
	if err := prepare(ctx, pool.Config().ConnConfig, schema, maker, tables); err != nil {
		pool.Close()
		return nil, err
	}
	return pool, nil
}

func prepare(ctx context.Context, config *pgx.ConnConfig, schema, maker, tables string) error {
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return fmt.Errorf("connect to the database: %w", err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if err := Make(ctx, conn, schema, maker); err != nil {
		return err
	}
	if err := migrations.Up(ctx, conn, migrations.Options{Schema: schema}); err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		// Programs that share a database may start at the same time.
		if _, err := tx.Exec(ctx, migrations.InSchema(lockSQL, schema)); err != nil {
			return fmt.Errorf("lock schema %s: %w", schema, err)
		}
		if _, err := tx.Exec(ctx, tables); err != nil {
			return fmt.Errorf("create the tables in schema %s: %w", schema, err)
		}
		return nil
	})
}

// Connect returns a pool whose connections see only this schema.
func Connect(ctx context.Context, url, schema string) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, errors.New("the database URL cannot be parsed")
	}
	config.ConnConfig.RuntimeParams["search_path"] = quote(schema)
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error { return checkPath(ctx, conn, schema) }
	return pgxpool.NewWithConfig(ctx, config)
}

// checkPath detects a pooler that drops the parameter: names without a schema would then be a
// user's tables.
func checkPath(ctx context.Context, conn *pgx.Conn, schema string) error {
	var current string
	if err := conn.QueryRow(ctx, "SELECT coalesce(current_schema(), '')").Scan(&current); err != nil {
		return fmt.Errorf("read the search_path: %w", err)
	}
	if current != schema {
		return fmt.Errorf("the connection is in schema %q, not in %s: connect to PostgreSQL directly, not through a pooler that drops search_path", current, schema)
	}
	return nil
}
