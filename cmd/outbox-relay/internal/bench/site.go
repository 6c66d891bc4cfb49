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

// Bounds and defaults of Options: the flags have them.
const (
	MessagesMin     = 2000 // runs, and says that its figures mean nothing
	MessagesDefault = 100_000
	MessagesMax     = 5_000_000

	RowsMin     = 2000
	RowsDefault = 500_000
	RowsMax     = 5_000_000

	// Below these the start and the end of a run are a good part of it: ratios are random.
	messagesTelling = 50_000
	rowsTelling     = 100_000

	RoundsMin     = 1
	RoundsDefault = 3
	RoundsMax     = 25
)

const (
	consumePartitions = 4
	relayPartitions   = 6
	payloadBytes      = 256 // of an outbox row
	consumeValueBytes = 100 // of a message
	keysDistinct      = 1000
)

// Options are the options of Consume and Relay.
type Options struct {
	// DatabaseURL is the URL of the PostgreSQL database. The benchmark creates its own schema there
	// and drops it.
	DatabaseURL string
	// Brokers are the seed brokers of the Kafka cluster. The benchmark creates its own topics and
	// deletes them.
	Brokers []string

	// Messages that the fastest variants of Consume handle in a round; the textbook handles a
	// fortieth of them.
	Messages int
	// Rows of the backlog that each variant of Relay drains.
	Rows int
	// Rounds in which the variants take turns.
	Rounds int
	// Progress gets one line at a time.
	Progress func(line string)
}

func (o Options) note(format string, args ...any) { o.Progress(fmt.Sprintf(format, args...)) }
