package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/migrations"
)

// site is what a service has anyway: a database with its tables, brokers and a topic.
type site struct {
	pool     *pgxpool.Pool
	brokers  []string
	topic    string
	client   *kgo.Client
	postgres *servers.Postgres
	kafka    *servers.Kafka
}

const tables = `
CREATE TABLE IF NOT EXISTS orders (id text PRIMARY KEY, amount int NOT NULL);
CREATE TABLE IF NOT EXISTS invoices (order_id text NOT NULL, amount int NOT NULL);
TRUNCATE orders, invoices`

func openSite(ctx context.Context) (_ *site, err error) {
	s := &site{topic: fmt.Sprintf("quickstart-%d", time.Now().UnixNano())}
	defer func() {
		if err != nil {
			s.close(ctx)
		}
	}()
	if s.postgres, err = servers.StartPostgres(ctx, servers.PostgresOptions{Embedded: os.Getenv("DATABASE_URL") == ""}); err != nil {
		return nil, err
	}
	if s.kafka, err = servers.StartKafka(ctx, servers.KafkaOptions{Embedded: os.Getenv("KAFKA_BROKERS") == ""}); err != nil {
		return nil, err
	}
	s.brokers = s.kafka.Brokers
	if err := migrate(ctx, s.postgres.URL); err != nil {
		return nil, err
	}
	if s.pool, err = pgxpool.New(ctx, s.postgres.URL); err != nil {
		return nil, errors.New("the database URL cannot be parsed")
	}
	if _, err := s.pool.Exec(ctx, tables); err != nil {
		return nil, fmt.Errorf("create the tables: %w", err)
	}
	if s.client, err = kgo.NewClient(kgo.SeedBrokers(s.brokers...), kgo.ConsumeTopics(s.topic)); err != nil {
		return nil, fmt.Errorf("kafka options: %w", err)
	}
	if _, err := kadm.NewClient(s.client).CreateTopic(ctx, 3, -1, nil, s.topic); err != nil {
		return nil, fmt.Errorf("create topic %s: %w", s.topic, err)
	}
	return s, nil
}

// migrate installs the tables of effectonce. In production it is a step of the deployment: outbox-relay migrate up.
func migrate(ctx context.Context, url string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return errors.New("the database does not answer")
	}
	defer func() { _ = conn.Close(ctx) }()
	return migrations.Up(ctx, conn, migrations.Options{})
}

func (s *site) close(ctx context.Context) {
	ctx = context.WithoutCancel(ctx)
	if s.client != nil {
		s.client.Close()
	}
	if s.pool != nil {
		s.pool.Close()
	}
	if s.kafka != nil {
		_ = s.kafka.Stop(ctx)
	}
	if s.postgres != nil {
		_ = s.postgres.Stop(ctx)
	}
}

// publishAgain reads the first message from the topic and sends it a second time, as a producer that
// missed an acknowledgement would.
func (s *site) publishAgain(ctx context.Context) error {
	for {
		fetches := s.client.PollRecords(ctx, 1)
		if err := fetches.Err(); err != nil {
			return fmt.Errorf("read the topic: %w", err)
		}
		for _, record := range fetches.Records() {
			again := &kgo.Record{Topic: record.Topic, Key: record.Key, Value: record.Value, Headers: record.Headers}
			return s.client.ProduceSync(ctx, again).FirstErr()
		}
	}
}

// handledSQL is true when the consumer's positions add up to all records: three orders and the duplicate.
const handledSQL = `SELECT coalesce(sum(next_offset), 0) >= 4 FROM effectonce.consumer_positions WHERE topic = $1`

func (s *site) report(ctx context.Context, out io.Writer) error {
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	for handled := false; !handled; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
		if err := s.pool.QueryRow(ctx, handledSQL, s.topic).Scan(&handled); err != nil {
			return fmt.Errorf("read the positions: %w", err)
		}
	}
	var orders, invoices int
	if err := s.pool.QueryRow(ctx, `SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM invoices)`).Scan(&orders, &invoices); err != nil {
		return fmt.Errorf("count: %w", err)
	}
	_, err := fmt.Fprintf(out, "%s\n%s\n%d orders, 4 messages (one of them twice), %d invoices\n", s.postgres.Description, s.kafka.Description, orders, invoices)
	return err
}

func toJSON(order Order) []byte {
	body, err := json.Marshal(order)
	if err != nil {
		panic(err) // a struct of a string and a number
	}
	return body
}
