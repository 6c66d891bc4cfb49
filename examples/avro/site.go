package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sr"
	"github.com/twmb/franz-go/pkg/sr/srfake"

	"github.com/effectonce/effectonce/internal/ownschema"
	"github.com/effectonce/effectonce/internal/servers"
)

// site is what a service has anyway: a database with its tables, brokers, a topic and a schema registry.
type site struct {
	pool     *pgxpool.Pool
	brokers  []string
	topic    string
	client   *kgo.Client
	registry *srfake.Registry
	schemas  *sr.Client
	refused  atomic.Int32
	postgres *servers.Postgres
	kafka    *servers.Kafka
}

// schema is this program's own: DATABASE_URL may name a database that is in use.
const schema = "effectonce_avro"

// tables begin empty, whatever an earlier run left.
const tables = `
CREATE TABLE IF NOT EXISTS effectonce_avro.invoices (order_id text NOT NULL, cents bigint NOT NULL, currency text NOT NULL);
TRUNCATE effectonce_avro.invoices`

// openSite takes the database of the URL, or starts one if there is none.
func openSite(ctx context.Context, databaseURL string) (_ *site, err error) {
	s := &site{topic: fmt.Sprintf("avro-%d", time.Now().UnixNano())}
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
	if s.pool, err = ownschema.Open(ctx, s.postgres.URL, schema, "examples/avro", tables); err != nil {
		return nil, err
	}
	if s.client, err = kgo.NewClient(kgo.SeedBrokers(s.brokers...)); err != nil {
		return nil, fmt.Errorf("kafka options: %w", err)
	}
	if _, err := kadm.NewClient(s.client).CreateTopic(ctx, 1, -1, nil, s.topic); err != nil {
		return nil, fmt.Errorf("create topic %s: %w", s.topic, err)
	}
	return s, s.openRegistry()
}

// openRegistry starts a registry that is away for the first few questions.
func (s *site) openRegistry() (err error) {
	s.registry = srfake.New()
	s.registry.Intercept(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodGet || s.refused.Load() >= 3 {
			return false
		}
		s.refused.Add(1)
		w.WriteHeader(http.StatusServiceUnavailable)
		return true
	})
	s.schemas, err = sr.NewClient(sr.URLs(s.registry.URL()))
	return err
}

func (s *site) register(schema string) (id int, err error) {
	id, _, err = s.registry.RegisterSchema(s.topic+"-value", sr.Schema{Schema: schema, Type: sr.TypeAvro})
	return id, err
}

func (s *site) close(ctx context.Context) {
	ctx = context.WithoutCancel(ctx)
	if s.client != nil {
		s.client.Close()
	}
	if s.pool != nil {
		s.pool.Close()
	}
	if s.registry != nil {
		s.registry.Close()
	}
	if s.kafka != nil {
		_ = s.kafka.Stop(ctx)
	}
	if s.postgres != nil {
		_ = s.postgres.Stop(ctx)
	}
}

// handledSQL is true when the consumer is through with all four messages.
const handledSQL = `SELECT coalesce(sum(next_offset), 0) >= 4 FROM effectonce_avro.consumer_positions WHERE topic = $1`

const countSQL = `SELECT (SELECT count(*) FROM effectonce_avro.invoices),
	(SELECT string_agg(currency, ' and ' ORDER BY order_id) FROM effectonce_avro.invoices),
	(SELECT count(*) FROM effectonce_avro.parked_messages WHERE topic = $1 AND reason = 'undecodable')`

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
	var invoices, undecodable int
	var currencies string
	if err := s.pool.QueryRow(ctx, countSQL, s.topic).Scan(&invoices, &currencies, &undecodable); err != nil {
		return fmt.Errorf("count: %w", err)
	}
	_, err := fmt.Fprintf(out, "%s\n%s\n%d invoices in %s, %d undecodable messages parked, the registry was away %d times\n",
		s.postgres.Description, s.kafka.Description, invoices, currencies, undecodable, s.refused.Load())
	return err
}
