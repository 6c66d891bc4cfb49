package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/ownschema"
	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/outbox"
)

// site is what a service has anyway: a database with its tables, brokers and a topic.
type site struct {
	pool     *pgxpool.Pool
	box      *outbox.Outbox
	brokers  []string
	topic    string
	client   *kgo.Client
	postgres *servers.Postgres
	kafka    *servers.Kafka
}

// schema is this program's own: DATABASE_URL may name a database that is in use. It holds the tables of effectonce, too,
// since another program's outbox is not to be relayed from here.
const schema = "effectonce_quickstart"

// tables begin empty, whatever an earlier run left.
const tables = `
CREATE TABLE IF NOT EXISTS effectonce_quickstart.orders (id text PRIMARY KEY, amount int NOT NULL);
CREATE TABLE IF NOT EXISTS effectonce_quickstart.invoices (order_id text NOT NULL, amount int NOT NULL);
TRUNCATE effectonce_quickstart.orders, effectonce_quickstart.invoices`

// openSite takes the database of the URL, or starts one if there is none.
func openSite(ctx context.Context, databaseURL string) (_ *site, err error) {
	s := &site{topic: fmt.Sprintf("quickstart-%d", time.Now().UnixNano())}
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
	s.brokers = s.kafka.Brokers
	if s.pool, err = ownschema.Open(ctx, s.postgres.URL, schema, "examples/quickstart", tables); err != nil {
		return nil, err
	}
	if s.box, err = outbox.New(outbox.Config{Schema: schema}); err != nil {
		return nil, err
	}
	if s.client, err = kgo.NewClient(kgo.SeedBrokers(s.brokers...), kgo.ConsumeTopics(s.topic)); err != nil {
		return nil, fmt.Errorf("kafka options: %w", err)
	}
	if _, err := kadm.NewClient(s.client).CreateTopic(ctx, 3, -1, nil, s.topic); err != nil {
		return nil, fmt.Errorf("create topic %s: %w", s.topic, err)
	}
	return s, nil
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
const handledSQL = `SELECT coalesce(sum(next_offset), 0) >= 4 FROM effectonce_quickstart.consumer_positions WHERE topic = $1`

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
