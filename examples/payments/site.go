package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/ownschema"
	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/relay"
)

// site is what a shop has anyway: a database with its tables, brokers, a topic, a payment provider and a bank.
type site struct {
	pool     *pgxpool.Pool
	topic    string
	provider *provider
	bank     *bank
	postgres *servers.Postgres
	kafka    *servers.Kafka
}

// schema is this program's own: DATABASE_URL may name a database that is in use.
const schema = "effectonce_payments"

// tables are shared by the sites of a database.
const tables = `
CREATE TABLE IF NOT EXISTS effectonce_payments.orders (id uuid PRIMARY KEY, customer text NOT NULL, cents bigint NOT NULL, state text NOT NULL, charge text);
CREATE TABLE IF NOT EXISTS effectonce_payments.receipts (customer text NOT NULL, cents bigint NOT NULL)`

// openSite takes the database of the URL, or starts one if there is none.
func openSite(ctx context.Context, databaseURL string) (_ *site, err error) {
	s := &site{topic: fmt.Sprintf("receipts-%d", time.Now().UnixNano())}
	defer func() {
		if err != nil {
			s.close(ctx)
		}
	}()
	if s.postgres, err = servers.StartPostgres(ctx, servers.PostgresOptions{DatabaseURL: databaseURL, Embedded: databaseURL == ""}); err != nil {
		return nil, err
	}
	if s.kafka, err = servers.StartKafka(ctx, servers.KafkaOptions{Embedded: os.Getenv("KAFKA_BROKERS") == ""}); err != nil {
		return nil, err
	}
	if s.provider, err = startProvider(ctx); err != nil {
		return nil, err
	}
	if s.bank, err = startBank(ctx); err != nil {
		return nil, err
	}
	if s.pool, err = ownschema.Open(ctx, s.postgres.URL, schema, "examples/payments", tables); err != nil {
		return nil, err
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
	r, err := relay.New(s.pool, kafka, relay.Config{Schema: schema})
	if err != nil {
		return nil, err
	}
	c, err := consumer.New(s.pool, kafka, consumer.JSON(sendReceipt), consumer.Config{
		Schema: schema, Group: "receipts-" + s.topic, Topics: []string{s.topic},
	})
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
const settledSQL = `SELECT coalesce(sum(next_offset), 0) >= $2 FROM effectonce_payments.consumer_positions WHERE topic = $1`

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
	if s.bank != nil {
		_ = s.bank.server.Close()
	}
	if s.kafka != nil {
		_ = s.kafka.Stop(ctx)
	}
	if s.postgres != nil {
		_ = s.postgres.Stop(ctx)
	}
}
