package bench

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/ownschema"
	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/migrations"
)

// removeMax bounds the removal of schema and topics: a server that does not answer must not block
// the terminal.
const removeMax = 30 * time.Second

// site is where a benchmark works: its own schema, topics and groups.
type site struct {
	Options

	schema string // also the prefix of the names of topics and groups
	pool   *pgxpool.Pool
	client *kgo.Client
	admin  *kadm.Client
	topics []string
	groups []string

	made          bool // the schema may exist
	mayCheckpoint bool
}

// newSite creates the schema. After an error nothing of it remains. The name is random, so that two
// benchmarks do not conflict.
func newSite(ctx context.Context, opts Options) (_ *site, err error) {
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails: crypto/rand documents it
	s := &site{Options: opts, schema: "effectonce_bench_" + hex.EncodeToString(random[:]), mayCheckpoint: true}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.remove(ctx))
		}
	}()
	if s.pool, err = pgxpool.New(ctx, opts.DatabaseURL); err != nil {
		return s, fmt.Errorf("database URL: %w", err)
	}
	if s.client, err = kgo.NewClient(kgo.SeedBrokers(opts.Brokers...)); err != nil {
		return s, fmt.Errorf("kafka options: %w", err)
	}
	s.admin = kadm.NewClient(s.client)
	conn, closeConn, err := s.connect(ctx)
	if err != nil {
		return s, err
	}
	defer closeConn()
	if err := ownschema.MakeNew(ctx, conn, s.schema, "outbox-relay bench"); err != nil {
		return s, err
	}
	s.made = true
	return s, migrations.Up(ctx, conn, migrations.Options{Schema: s.schema})
}

// remove removes everything that the site created. It also runs after ctx was cancelled.
func (s *site) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeMax)
	defer cancel()
	var problems []error
	if s.client != nil {
		problems = append(problems, s.removeFromKafka(ctx))
		s.client.Close()
	}
	if s.pool != nil {
		problems = append(problems, s.dropSchema(ctx))
		s.pool.Close()
	}
	return errors.Join(problems...)
}

func (s *site) dropSchema(ctx context.Context) error {
	if !s.made {
		return nil
	}
	if _, err := s.pool.Exec(ctx, "DROP SCHEMA IF EXISTS "+pgx.Identifier{s.schema}.Sanitize()+" CASCADE"); err != nil {
		return fmt.Errorf("drop schema %s, which still exists: %w", s.schema, err)
	}
	return nil
}

func (s *site) removeFromKafka(ctx context.Context) error {
	var problems []error
	if len(s.groups) > 0 {
		// Groups without members expire eventually; an error here does not matter.
		_, _ = s.admin.DeleteGroups(ctx, s.groups...)
	}
	if len(s.topics) > 0 {
		deleted, err := s.admin.DeleteTopics(ctx, s.topics...)
		if err = errors.Join(err, deleted.Error()); err != nil && !errors.Is(err, kerr.UnknownTopicOrPartition) {
			problems = append(problems, fmt.Errorf("delete topics %q, which still exist: %w", s.topics, err))
		}
	}
	return errors.Join(problems...)
}

// topic creates a topic.
func (s *site) topic(ctx context.Context, suffix string, partitions int) (string, error) {
	name := s.schema + "-" + suffix
	// -1 leaves the number of replicas to the cluster.
	if _, err := s.admin.CreateTopic(ctx, int32(partitions), -1, nil, name); err != nil {
		return "", fmt.Errorf("create topic %s: %w", name, err)
	}
	s.topics = append(s.topics, name)
	return name, nil
}

// ends returns the end offsets of a topic.
func (s *site) ends(ctx context.Context, topic string) (kadm.ListedOffsets, error) {
	ends, err := s.admin.ListEndOffsets(ctx, topic)
	if err = errors.Join(err, ends.Error()); err != nil {
		return nil, fmt.Errorf("read the end offsets of topic %s: %w", topic, err)
	}
	return ends, nil
}

// group returns the name of a consumer group that is removed with the site.
func (s *site) group(suffix string) string {
	name := s.schema + "-" + suffix
	s.groups = append(s.groups, name)
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

// connect opens a connection for one run.
func (s *site) connect(ctx context.Context) (*pgx.Conn, func(), error) {
	conn, err := pgx.Connect(ctx, s.DatabaseURL)
	if err != nil {
		return nil, nil, fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	return conn, func() {
		_ = conn.Close(context.WithoutCancel(ctx)) // an error no longer matters
	}, nil
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
