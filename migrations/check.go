package migrations

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	versionTable       = "schema_version"
	compatibilityTable = "schema_compatibility"
)

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
	read := func(sql string, into *int) error {
		err := db.QueryRow(ctx, InSchema(sql, schema)).Scan(into)
		var pgErr *pgconn.PgError
		if errors.As(err, &pgErr) && (pgErr.Code == "42P01" || pgErr.Code == "3F000") || errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		return err
	}
	if err := read("-- migrations.status\nSELECT version FROM effectonce."+versionTable, &state.Current); err != nil {
		return State{}, fmt.Errorf("read the schema version: %w", err)
	}
	// Only where it decides: versions before 5 lack the table, and a failed statement would end the caller's transaction.
	if state.Current > state.Latest {
		if err := read("-- migrations.oldest\nSELECT oldest FROM effectonce."+compatibilityTable, &state.Oldest); err != nil {
			return State{}, fmt.Errorf("read which programs the schema works with: %w", err)
		}
	}
	return state, nil
}

// Check finds out at a program's start whether it works with the database's schema: that of its own version, or
// a newer one that says so (State.Oldest). The error is ErrTooOld or ErrTooNew with the remedy in its text, or
// that of the database.
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
	case state.Current > state.Latest && !state.Compatible():
		return state.tooNew()
	}
	return nil
}

func (s State) tooNew() error {
	return fmt.Errorf("%w: schema %s has version %d, this program knows %d: update this program", ErrTooNew, s.Schema, s.Current, s.Latest)
}
