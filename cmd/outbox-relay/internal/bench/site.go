package bench

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	own "github.com/effectonce/effectonce/cmd/outbox-relay/internal/site"
	"github.com/effectonce/effectonce/internal/pgerr"
)

// site is where a benchmark works: its own schema, topics and groups.
type site struct {
	Options
	*own.Site

	pool          *pgxpool.Pool
	mayCheckpoint bool
}

// newSite creates the schema. After an error nothing of it remains.
func newSite(ctx context.Context, opts Options) (*site, error) {
	pool, err := pgxpool.New(ctx, opts.DatabaseURL)
	if err != nil {
		return nil, fmt.Errorf("database URL: %w", err)
	}
	made, err := own.New(ctx, opts.DatabaseURL, opts.Brokers, own.Name("effectonce_bench_"), "outbox-relay bench")
	if err != nil {
		pool.Close()
		return nil, err
	}
	return &site{Options: opts, Site: made, pool: pool, mayCheckpoint: true}, nil
}

func (s *site) remove(ctx context.Context) error {
	s.pool.Close()
	return s.Remove(ctx)
}

// topic creates a topic.
func (s *site) topic(ctx context.Context, suffix string, partitions int) (string, error) {
	name := s.Schema + "-" + suffix
	return name, s.Topic(ctx, name, partitions)
}

// group returns the name of a consumer group that is removed with the site.
func (s *site) group(suffix string) string {
	name := s.Schema + "-" + suffix
	s.Group(name)
	return name
}

// exec runs statements in the site's schema.
func (s *site) exec(ctx context.Context, what, sql string) error {
	// The simple protocol takes several statements at once.
	if _, err := s.pool.Exec(ctx, s.sql(sql), pgx.QueryExecModeSimpleProtocol); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// checkpoint makes every run begin right after a checkpoint, so that all runs have the same
// conditions: none falls into one run and not into another, and after a checkpoint PostgreSQL logs
// whole pages. It needs a right that a role may lack.
func (s *site) checkpoint(ctx context.Context) error {
	if !s.mayCheckpoint {
		return nil
	}
	_, err := s.pool.Exec(ctx, "CHECKPOINT")
	if pgerr.Is(err, pgerr.InsufficientPrivilege) {
		s.mayCheckpoint = false
		return nil
	}
	if err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	return nil
}

// number reads one number.
func (s *site) number(ctx context.Context, what, sql string) (n int64, err error) {
	if err := s.pool.QueryRow(ctx, s.sql(sql)).Scan(&n); err != nil {
		return 0, fmt.Errorf("read %s: %w", what, err)
	}
	return n, nil
}

// newPool creates a pool for one run, so that every variant prepares its own statements.
func (s *site) newPool(ctx context.Context, connections int) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(s.DatabaseURL)
	if err != nil {
		return nil, fmt.Errorf("database URL: %w", err)
	}
	config.MaxConns = int32(connections)
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	return pool, nil
}
