package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
)

// errAllDone stops a consumer that handled everything.
var errAllDone = errors.New("every message is handled")

// engine runs package consumer over a topic and returns its rate. It uses only defaults.
func (b *consumeBench) engine(ctx context.Context, l load, group string, handler consumer.Handler, level consumer.Dedup) (float64, error) {
	pool, err := b.newPool(ctx, b.opts.Partitions+2)
	if err != nil {
		return 0, err
	}
	defer pool.Close()
	run, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	m := &meter{want: l.messages}
	c, err := consumer.New(pool, []kgo.Opt{kgo.SeedBrokers(b.Brokers...)}, handler, consumer.Config{
		Group: group, Topics: []string{l.topic}, Schema: b.schema, Dedup: level, Logger: slog.New(slog.DiscardHandler), // errors end the run
		Hooks: consumer.Hooks{
			Processed: func(p consumer.Processed) {
				if m.add(p.Fresh + p.Duplicates + p.Parked) {
					stop(errAllDone)
				}
			},
			Failed: func(f consumer.Failed) { stop(fmt.Errorf("%s: %w", f.Message, f.Err)) },
		},
	})
	if err != nil {
		return 0, err
	}
	if err := c.Run(run); err != nil {
		return 0, err
	}
	if cause := context.Cause(run); !errors.Is(cause, errAllDone) {
		return 0, cause
	}
	return m.rate()
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
