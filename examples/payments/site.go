package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/relay"
)

// site is what a shop has anyway: a database with its tables, brokers, a topic, and a payment provider.
type site struct {
	pool     *pgxpool.Pool
	topic    string
	provider *provider
	postgres *servers.Postgres
	kafka    *servers.Kafka
}

// tables are created under a lock, since sites that share a database may start at once.
const tables = `
SELECT pg_advisory_xact_lock(4127);
CREATE TABLE IF NOT EXISTS payment_orders (id uuid PRIMARY KEY, customer text NOT NULL, cents bigint NOT NULL, state text NOT NULL, charge text);
CREATE TABLE IF NOT EXISTS payment_receipts (customer text NOT NULL, cents bigint NOT NULL)`

func openSite(ctx context.Context) (_ *site, err error) {
	s := &site{topic: fmt.Sprintf("receipts-%d", time.Now().UnixNano())}
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
	if s.provider, err = startProvider(ctx); err != nil {
		return nil, err
	}
	conn, err := pgx.Connect(ctx, s.postgres.URL)
	if err != nil {
		return nil, errors.New("the database does not answer")
	}
	defer func() { _ = conn.Close(ctx) }()
	if err := migrations.Up(ctx, conn, migrations.Options{}); err != nil { // in production: outbox-relay migrate up
		return nil, err
	}
	if _, err := conn.Exec(ctx, tables); err != nil {
		return nil, fmt.Errorf("create the tables: %w", err)
	}
	if s.pool, err = pgxpool.New(ctx, s.postgres.URL); err != nil {
		return nil, errors.New("the database URL cannot be parsed")
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(s.kafka.Brokers...))
	if err != nil {
		return nil, fmt.Errorf("kafka options: %w", err)
	}
	defer client.Close()
	if _, err := kadm.NewClient(client).CreateTopic(ctx, 3, -1, nil, s.topic); err != nil {
		return nil, fmt.Errorf("create topic %s: %w", s.topic, err)
	}
	return s, nil
}

// start runs the relay and the consumer of receipts until ctx ends. Usually they are programs of their own.
func (s *site) start(ctx context.Context) (wait func() error, err error) {
	kafka := []kgo.Opt{kgo.SeedBrokers(s.kafka.Brokers...)}
	r, err := relay.New(s.pool, kafka, relay.Config{})
	if err != nil {
		return nil, err
	}
	c, err := consumer.New(s.pool, kafka, consumer.JSON(sendReceipt), consumer.Config{Group: "receipts-" + s.topic, Topics: []string{s.topic}})
	if err != nil {
		return nil, err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return r.Run(ctx) })
	group.Go(func() error { return c.Run(ctx) })
	return group.Wait, nil
}

// customerOf names a customer whom nobody else has, in a database that is used again.
func (s *site) customerOf(death string) string {
	return cmp.Or(death, "nobody") + "@" + s.topic + ".example.com"
}

// settledSQL is true when the positions of the consumer add up to the receipts.
const settledSQL = `SELECT coalesce(sum(next_offset), 0) >= $2 FROM effectonce.consumer_positions WHERE topic = $1`

// settled waits until as many receipts were handled.
func (s *site) settled(ctx context.Context, receipts int) error {
	for {
		var done bool
		if err := s.pool.QueryRow(ctx, settledSQL, s.topic, receipts).Scan(&done); err != nil {
			return fmt.Errorf("read the positions: %w", err)
		}
		if done {
			return nil
		}
		if !pause(ctx, 10*time.Millisecond) {
			return ctx.Err()
		}
	}
}

func (s *site) close(ctx context.Context) {
	ctx = context.WithoutCancel(ctx)
	if s.pool != nil {
		s.pool.Close()
	}
	if s.provider != nil {
		_ = s.provider.server.Close()
	}
	if s.kafka != nil {
		_ = s.kafka.Stop(ctx)
	}
	if s.postgres != nil {
		_ = s.postgres.Stop(ctx)
	}
}
