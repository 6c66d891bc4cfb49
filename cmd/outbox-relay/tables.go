package main

import (
	"context"
	"time"

	"github.com/effectonce/effectonce/migrations"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const changeMax = 30 * time.Second

// withTables connects and checks the tables. A writing command needs a primary.
func (s *settings) withTables(ctx context.Context, writes bool, work func(context.Context, *pgx.Conn) error) error {
	connect := s.connect
	if writes {
		connect = s.connectWriting
	}
	conn, err := connect(ctx)
	if err != nil {
		return err
	}
	defer hangUp(ctx, conn)
	if err := migrations.Check(ctx, conn, migrations.Options{Schema: s.schema}); err != nil {
		return err
	}
	return work(ctx, conn)
}

// onSchema runs f with a pool of the primary, after checking the schema's version.
func (s *settings) onSchema(ctx context.Context, f func(ctx context.Context, pool *pgxpool.Pool) error) error {
	return s.onSchemaFor(ctx, changeMax, f)
}

func (s *settings) onSchemaFor(ctx context.Context, limit time.Duration, f func(ctx context.Context, pool *pgxpool.Pool) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	pool, err := s.connectPrimary(ctx, 1)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := migrations.Check(ctx, pool, migrations.Options{Schema: s.schema}); err != nil {
		return err
	}
	return f(ctx, pool)
}
