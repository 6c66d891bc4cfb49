package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sr"
	"github.com/twmb/franz-go/pkg/sr/srfake"

	"github.com/effectonce/effectonce/examples/startup"
)

// site is the environment of the example and a schema registry.
type site struct {
	*startup.Site
	client   *kgo.Client
	registry *srfake.Registry
	schemas  *sr.Client
	refused  atomic.Int32
}

// schema is this program's own: DATABASE_URL may name a database that is in use.
const schema = "effectonce_avro"

// tables are empty at the start, even after an earlier run.
const tables = `
CREATE TABLE IF NOT EXISTS effectonce_avro.invoices (order_id text NOT NULL, cents bigint NOT NULL, currency text NOT NULL);
TRUNCATE effectonce_avro.invoices`

// openSite connects to the database of the URL, or starts one if the URL is empty.
func openSite(ctx context.Context, databaseURL string) (_ *site, err error) {
	s := &site{}
	if s.Site, err = startup.Open(ctx, "avro", databaseURL, tables, 1); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.Close(ctx)
		}
	}()
	if s.client, err = kgo.NewClient(s.Kafka()...); err != nil {
		return nil, err
	}
	return s, s.openRegistry()
}

// openRegistry starts a registry that is unavailable for the first three requests.
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
	id, _, err = s.registry.RegisterSchema(s.Topic+"-value", sr.Schema{Schema: schema, Type: sr.TypeAvro})
	return id, err
}

func (s *site) close(ctx context.Context) {
	s.client.Close()
	s.registry.Close()
	s.Close(ctx)
}

const countSQL = `SELECT (SELECT count(*) FROM effectonce_avro.invoices),
	(SELECT string_agg(currency, ' and ' ORDER BY order_id) FROM effectonce_avro.invoices),
	(SELECT count(*) FROM effectonce_avro.parked_messages WHERE topic = $1 AND reason = 'undecodable')`

// report waits until the consumer has handled all four messages.
func (s *site) report(ctx context.Context, out io.Writer) error {
	if err := s.Handled(ctx, 4); err != nil {
		return err
	}
	var invoices, undecodable int
	var currencies string
	if err := s.Pool.QueryRow(ctx, countSQL, s.Topic).Scan(&invoices, &currencies, &undecodable); err != nil {
		return fmt.Errorf("count: %w", err)
	}
	_, err := fmt.Fprintf(out, "%s\n%d invoices in %s, %d undecodable messages parked, the registry was unavailable %d times\n",
		s.Servers, invoices, currencies, undecodable, s.refused.Load())
	return err
}
