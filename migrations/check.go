package migrations

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/pgerr"
)

const (
	versionTable       = "schema_version"
	compatibilityTable = "schema_compatibility"
)

// Querier is a pool, a connection or a transaction, for Status and Check.
type Querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

const versionForeign = `-- migrations.version_foreign
SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  WHERE n.nspname = $1::text AND c.relname IN ('schema_version', 'schema_compatibility') AND (c.relkind <> 'r'::"char" OR c.relrowsecurity))`

// Status reads the version of the database without changing anything.
func Status(ctx context.Context, db Querier, opts Options) (State, error) {
	all, err := All(opts)
	if err != nil {
		return State{}, err
	}
	schema, _ := opts.Resolve()
	state := State{Schema: schema, Latest: len(all)}
	read := func(sql string, into *int) error {
		err := db.QueryRow(ctx, InSchema(sql, schema)).Scan(into)
		if pgerr.Is(err, pgerr.UndefinedTable, pgerr.UnknownSchema) || errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		return err
	}
	// A view, or a policy, would run code of its owner.
	var foreign bool
	if err := db.QueryRow(ctx, versionForeign, schema).Scan(&foreign); err != nil {
		return State{}, fmt.Errorf("look for the schema version: %w", err)
	}
	if foreign {
		return State{}, fmt.Errorf("%w: schema %s: %s is not a table, or has row security: no migration made it", ErrNotOurs, schema, versionTable)
	}
	if err := read("-- migrations.status\nSELECT version FROM effectonce."+versionTable, &state.Current); err != nil {
		return State{}, fmt.Errorf("read the schema version: %w", err)
	}
	// Read it only if it decides: a role may lack the right to, and a failed statement would abort the
	// caller's transaction.
	if state.Current > state.Latest {
		if err := read("-- migrations.oldest\nSELECT oldest FROM effectonce."+compatibilityTable, &state.Oldest); err != nil {
			return State{}, fmt.Errorf("read the oldest version that the schema works with: %w", err)
		}
	}
	return state, nil
}

// Check reports, at a program's start, whether the program works with the database's schema: its
// own version, or a newer one that declares compatibility (State.Oldest). The error is ErrTooOld or
// ErrTooNew with the remedy in its text, or an error of the database.
func Check(ctx context.Context, db Querier, opts Options) error {
	state, err := Status(ctx, db, opts)
	switch {
	case err != nil:
		return err
	case state.Current == 0:
		return &notInstalledError{state.Schema}
	case state.Current < state.Latest:
		return fmt.Errorf("%w: schema %s has version %d, this program needs %d: run \"outbox-relay migrate up\"",
			ErrTooOld, state.Schema, state.Current, state.Latest)
	case state.Current > state.Latest && !state.Compatible():
		return state.tooNew()
	}
	return nil
}

// notInstalledError is ErrTooOld with a different text.
type notInstalledError struct{ schema string }

func (e *notInstalledError) Error() string {
	return fmt.Sprintf("schema %s is not installed in this database: run \"outbox-relay migrate up\"", e.schema)
}

func (e *notInstalledError) Is(target error) bool { return target == ErrTooOld }

func (s State) tooNew() error {
	return fmt.Errorf("%w: schema %s has version %d, this program knows %d: update this program", ErrTooNew, s.Schema, s.Current, s.Latest)
}
