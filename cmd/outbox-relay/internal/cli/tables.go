package cli

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/migrations"
)

const (
	// ReadMax is the time limit of Read.
	ReadMax = 30 * time.Second
	// ChangeMax is the time limit of OnSchema.
	ChangeMax = 30 * time.Second
)

// Read runs work with a connection for reading, after checking the version of the tables.
func (s *Settings) Read(ctx context.Context, work func(context.Context, *pgx.Conn) error) error {
	ctx, cancel := context.WithTimeout(ctx, ReadMax)
	defer cancel()
	return s.WithTables(ctx, false, work)
}

// WithTables runs work with a connection, after checking the version of the tables. A command that
// writes needs a primary.
func (s *Settings) WithTables(ctx context.Context, writes bool, work func(context.Context, *pgx.Conn) error) error {
	connect := s.Connect
	if writes {
		connect = s.ConnectWriting
	}
	conn, err := connect(ctx)
	if err != nil {
		return err
	}
	defer HangUp(ctx, conn)
	if err := migrations.Check(ctx, conn, migrations.Options{Schema: s.Schema}); err != nil {
		return err
	}
	return work(ctx, conn)
}

// OnSchema runs f with a pool of the primary, after checking the version of the tables. It takes at
// most ChangeMax.
func (s *Settings) OnSchema(ctx context.Context, f func(ctx context.Context, pool *pgxpool.Pool) error) error {
	return s.OnSchemaFor(ctx, ChangeMax, f)
}

// OnSchemaFor is OnSchema with another time limit.
func (s *Settings) OnSchemaFor(ctx context.Context, limit time.Duration, f func(ctx context.Context, pool *pgxpool.Pool) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	pool, err := s.ConnectPrimary(ctx, 1)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := migrations.Check(ctx, pool, migrations.Options{Schema: s.Schema}); err != nil {
		return err
	}
	return f(ctx, pool)
}
