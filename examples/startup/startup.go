// Package startup gives the examples what every service already has: a database with tables,
// brokers and a topic. Your service has its own; everything else of an example can be copied as it
// is.
//
// With DATABASE_URL and KAFKA_BROKERS it uses these servers. Otherwise it starts both, and they end
// with the example. Each example creates its own schema, and touches no table that it did not
// create.
package startup

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/ownschema"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/servers"
)

// Site is the environment of an example: database, brokers and topic.
type Site struct {
	Pool   *pgxpool.Pool // its connections have the example's schema in their search_path
	Schema string        // of the example's tables and of effectonce's, so that the example does not relay another program's outbox
	// DatabaseURL is for another process that uses the same database; see Connect.
	DatabaseURL string
	Brokers     []string
	Topic       string // new for each Site
	// Servers describes database and brokers, one line each.
	Servers string

	postgres *servers.Postgres
	kafka    *servers.Kafka
}

// Open connects to the database of the URL, or starts one if the URL is empty. It creates the
// schema effectonce_NAME with the tables of effectonce and those of the SQL, and a topic. Close
// releases what Open started. If Open fails, it does so itself.
func Open(ctx context.Context, name, databaseURL, tables string, partitions int32) (_ *Site, err error) {
	s := &Site{Schema: "effectonce_" + name, Topic: fmt.Sprintf("%s-%d", name, time.Now().UnixNano())}
	defer func() {
		if err != nil {
			s.Close(ctx)
		}
	}()
	if s.postgres, err = servers.StartPostgres(ctx, servers.PostgresOptions{DatabaseURL: databaseURL, Embedded: databaseURL == ""}); err != nil {
		return nil, err
	}
	if s.kafka, err = servers.StartKafka(ctx, servers.KafkaOptions{Embedded: os.Getenv("KAFKA_BROKERS") == ""}); err != nil {
		return nil, err
	}
	s.DatabaseURL, s.Brokers, s.Servers = s.postgres.URL, s.kafka.Brokers, s.postgres.Description+"\n"+s.kafka.Description
	if s.Pool, err = ownschema.Open(ctx, s.postgres.URL, s.Schema, "examples/"+name, tables); err != nil {
		return nil, err
	}
	client, err := kgo.NewClient(s.Kafka()...)
	if err != nil {
		return nil, fmt.Errorf("kafka options: %w", err)
	}
	defer client.Close()
	if _, err := kadm.NewClient(client).CreateTopic(ctx, partitions, -1, nil, s.Topic); err != nil {
		return nil, fmt.Errorf("create topic %s: %w", s.Topic, err)
	}
	return s, nil
}

// Connect returns a pool whose connections see only the schema of an example.
func Connect(ctx context.Context, databaseURL, schema string) (*pgxpool.Pool, error) {
	return ownschema.Connect(ctx, databaseURL, schema)
}

// Kafka returns the options of a client.
func (s *Site) Kafka() []kgo.Opt { return []kgo.Opt{kgo.SeedBrokers(s.Brokers...)} }

// positionsSQL counts the messages of a topic that consumers have handled.
const positionsSQL = `SELECT coalesce(sum(next_offset), 0) FROM consumer_positions WHERE topic = $1`

// Handled waits until the consumers have handled that many messages of the topic.
func (s *Site) Handled(ctx context.Context, messages int) error {
	for {
		var handled int
		if err := s.Pool.QueryRow(ctx, positionsSQL, s.Topic).Scan(&handled); err != nil {
			return fmt.Errorf("read the positions: %w", err)
		}
		if handled >= messages {
			return nil
		}
		if !pause.For(ctx, 10*time.Millisecond) {
			return ctx.Err()
		}
	}
}

// Close closes the pool and stops what was started.
func (s *Site) Close(ctx context.Context) {
	ctx = context.WithoutCancel(ctx)
	if s.Pool != nil {
		s.Pool.Close()
	}
	if s.kafka != nil {
		_ = s.kafka.Stop(ctx)
	}
	if s.postgres != nil {
		_ = s.postgres.Stop(ctx)
	}
}
