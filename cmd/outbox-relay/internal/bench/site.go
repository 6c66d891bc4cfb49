package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

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
	samples       samples
	took          map[string][]footprint // by variant, a round each
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
	return &site{Options: opts, Site: made, pool: pool, mayCheckpoint: true, samples: samples{}, took: map[string][]footprint{}}, nil
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

// footprint is what a run took, or what there is of it.
type footprint struct{ bytes, wal, xids int64 }

func (s *site) footprint(ctx context.Context) (f footprint, err error) {
	if err = s.pool.QueryRow(ctx, s.sql(footprintSQL)).Scan(&f.bytes, &f.wal, &f.xids); err != nil {
		err = fmt.Errorf("read the sizes of the tables and of the write-ahead log: %w", err)
	}
	return f, err
}

// turn runs a variant in empty tables, right after a checkpoint, and keeps its rate if every effect
// happened exactly once. The write-ahead log is the whole server's: on a server with other work it is
// too high.
func (s *site) turn(ctx context.Context, key string, effects int, run func(context.Context) (float64, error)) error {
	if err := errors.Join(s.exec(ctx, "empty the tables", forgetSQL), s.checkpoint(ctx)); err != nil {
		return err
	}
	before, err := s.footprint(ctx)
	if err != nil {
		return err
	}
	rate, err := run(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	// Before anything reads the tables: the first reader of a page may log it once more.
	after, err := s.footprint(ctx)
	if err != nil {
		return err
	}
	if err := s.judge(ctx, key, effects); err != nil {
		return err
	}
	s.rate(key, rate)
	s.took[key] = append(s.took[key], footprint{after.bytes - before.bytes, after.wal - before.wal, after.xids - before.xids})
	return nil
}

// compare adds to the samples what a variant took more than another one, per message: of space, and
// of write-ahead log.
func (s *site) compare(key, less string, messages int, space, wal string) {
	for round, took := range s.took[key] {
		before := s.took[less][round]
		s.samples.add(space, float64(took.bytes-before.bytes)/float64(messages))
		if s.mayCheckpoint {
			s.samples.add(wal, float64(took.wal-before.wal)/float64(messages))
		}
	}
}

func (s *site) rate(key string, perSecond float64) {
	s.samples.add(key, perSecond)
	s.note("%-14s %9.0f a second", key, perSecond)
}

// judge is the verdict on a run that should have had that many effects.
func (s *site) judge(ctx context.Context, key string, want int) error {
	var effects, different int
	if err := s.pool.QueryRow(ctx, s.sql(effectsSQL)).Scan(&effects, &different); err != nil {
		return fmt.Errorf("%s: count the effects: %w", key, err)
	}
	if effects != want || different != want {
		return fmt.Errorf("%s: there are %d effects, %d of them different, instead of %d: this is a bug, the figures are void; please report it",
			key, effects, different, want)
	}
	return nil
}

// rounds runs every variant once a round. The order rotates, so that no variant always comes first.
func (s *site) rounds(variants ...func(round int) error) error {
	for round := range s.Rounds {
		s.note("round %d", round+1)
		for i := range variants {
			if err := variants[(i+round)%len(variants)](round); err != nil {
				return fmt.Errorf("round %d: %w", round+1, err)
			}
		}
	}
	return nil
}

// distant is a connection to a server that is as far away.
type distant struct {
	net.Conn

	away time.Duration
}

func (c distant) Write(b []byte) (int, error) {
	<-time.After(c.away)
	return c.Conn.Write(b)
}

// newPool creates a pool for one run, so that every variant prepares its own statements.
func (s *site) newPool(ctx context.Context, connections int) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(s.DatabaseURL)
	if err != nil {
		return nil, fmt.Errorf("database URL: %w", err)
	}
	config.MaxConns = int32(connections)
	if s.Delay > 0 {
		dial := config.ConnConfig.DialFunc
		config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dial(ctx, network, address)
			return distant{conn, s.Delay}, err
		}
	}
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

	RequestsMin     = 2000
	RequestsDefault = 20_000
	RequestsMax     = 5_000_000

	StatementsMin     = 2
	StatementsDefault = 2
	StatementsMax     = 50

	DelayMax = 100 * time.Millisecond

	// Below these the start and the end of a run are a good part of it: ratios are random.
	messagesTelling = 50_000
	rowsTelling     = 100_000
	requestsTelling = 10_000

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

// Options are the options of Consume, Relay and Keys.
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
	// Requests that each variant of Keys executes in a round, and Statements of their work.
	Requests, Statements int
	// Delay of everything that a variant sends to PostgreSQL, as by a network.
	Delay time.Duration
	// Rounds in which the variants take turns.
	Rounds int
	// Progress gets one line at a time.
	Progress func(line string)
}

func (o Options) note(format string, args ...any) { o.Progress(fmt.Sprintf(format, args...)) }
