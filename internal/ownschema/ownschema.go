// Package ownschema gives an example or a demo a schema that it made itself. Databases that users name for a try have
// tables that must survive it: what is not marked as made here is left as it is, and refused.
package ownschema

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/migrations"
)

// ErrNotOwn says that a schema of the wanted name exists and has no mark of the caller. Nothing was changed.
var ErrNotOwn = errors.New("its tables are not touched")

// lockSQL keeps programs that share a database from making the schema at once: IF NOT EXISTS is not safe against itself.
const lockSQL = `-- ownschema.lock
SELECT pg_advisory_xact_lock(hashtextextended('effectonce ownschema', 0))`

const lookSQL = `-- ownschema.look
SELECT count(*) > 0, coalesce(max(obj_description(oid, 'pg_namespace')), '') FROM pg_catalog.pg_namespace WHERE nspname = $1`

// mark is the comment of a schema that maker made.
func mark(maker string) string {
	return "made by " + maker + " of effectonce, which may empty or drop it"
}

// Make makes a schema and marks it. One that is there is accepted if this maker marked it; it may hold what an earlier
// run left.
func Make(ctx context.Context, conn *pgx.Conn, schema, maker string) error {
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		var there bool
		var comment string
		if _, err := tx.Exec(ctx, lockSQL); err != nil {
			return fmt.Errorf("lock schema %s: %w", schema, err)
		}
		if err := tx.QueryRow(ctx, lookSQL, schema).Scan(&there, &comment); err != nil {
			return fmt.Errorf("look for schema %s: %w", schema, err)
		}
		switch {
		case there && comment == mark(maker):
			return nil
		case there:
			return fmt.Errorf("schema %s is there and %s did not make it: %w. Name another database, or rename the schema: ALTER SCHEMA %s RENAME TO …",
				schema, maker, ErrNotOwn, quote(schema))
		}
		return create(ctx, tx, schema, maker)
	})
}

// MakeNew makes a schema that must not be there yet, so that its maker may drop it.
func MakeNew(ctx context.Context, conn *pgx.Conn, schema, maker string) error {
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error { return create(ctx, tx, schema, maker) })
}

// duplicateSchema is PostgreSQL's code for a CREATE SCHEMA of a name that is taken.
const duplicateSchema = "42P06"

func create(ctx context.Context, tx pgx.Tx, schema, maker string) error {
	_, err := tx.Exec(ctx, "CREATE SCHEMA "+quote(schema))
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == duplicateSchema {
		return fmt.Errorf("schema %s is there, and another made it: %w", schema, ErrNotOwn)
	}
	if err == nil {
		// COMMENT takes no parameters; the mark has no quotes.
		_, err = tx.Exec(ctx, "COMMENT ON SCHEMA "+quote(schema)+" IS '"+mark(maker)+"'")
	}
	if err != nil {
		return fmt.Errorf("create schema %s: %w", schema, err)
	}
	return nil
}

func quote(name string) string { return pgx.Identifier{name}.Sanitize() }

// Open makes the schema with the tables of effectonce and those of the SQL text in it, and returns what Connect does. In
// production the tables of effectonce come from a step of the deployment (outbox-relay migrate up), into a schema that
// only they are in.
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
		// Programs that share a database may start at once.
		if _, err := tx.Exec(ctx, lockSQL); err != nil {
			return fmt.Errorf("lock schema %s: %w", schema, err)
		}
		if _, err := tx.Exec(ctx, tables); err != nil {
			return fmt.Errorf("create the tables in schema %s: %w", schema, err)
		}
		return nil
	})
}

// Connect returns a pool whose connections see no schema but this one.
func Connect(ctx context.Context, url, schema string) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, errors.New("the database URL cannot be parsed")
	}
	config.ConnConfig.RuntimeParams["search_path"] = quote(schema)
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error { return checkPath(ctx, conn, schema) }
	return pgxpool.NewWithConfig(ctx, config)
}

// checkPath finds a pooler that drops the parameter: names without a schema would be a user's tables.
func checkPath(ctx context.Context, conn *pgx.Conn, schema string) error {
	var current string
	if err := conn.QueryRow(ctx, "SELECT coalesce(current_schema(), '')").Scan(&current); err != nil {
		return fmt.Errorf("ask for the search_path: %w", err)
	}
	if current != schema {
		return fmt.Errorf("the connection is in schema %q, not in %s: connect to PostgreSQL itself, not to a pooler that drops search_path", current, schema)
	}
	return nil
}
