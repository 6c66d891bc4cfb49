package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/examples/startup"
	"github.com/effectonce/effectonce/outbox"
)

// site is the environment of the example and an outbox.
type site struct {
	*startup.Site
	box    *outbox.Outbox
	client *kgo.Client
}

// schema is this program's own: DATABASE_URL may name a database that is in use. It also holds the
// tables of effectonce, so that the example does not relay another program's outbox.
const schema = "effectonce_quickstart"

// tables are empty at the start, even after an earlier run.
const tables = `
CREATE TABLE IF NOT EXISTS effectonce_quickstart.orders (id text PRIMARY KEY, amount int NOT NULL);
CREATE TABLE IF NOT EXISTS effectonce_quickstart.invoices (order_id text NOT NULL, amount int NOT NULL);
TRUNCATE effectonce_quickstart.orders, effectonce_quickstart.invoices`

// openSite connects to the database of the URL, or starts one if the URL is empty.
func openSite(ctx context.Context, databaseURL string) (_ *site, err error) {
	s := &site{}
	if s.Site, err = startup.Open(ctx, "quickstart", databaseURL, tables, 3); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.Close(ctx)
		}
	}()
	if s.box, err = outbox.New(outbox.Config{Schema: schema}); err != nil {
		return nil, err
	}
	s.client, err = kgo.NewClient(append(s.Kafka(), kgo.ConsumeTopics(s.Topic))...)
	return s, err
}

func (s *site) close(ctx context.Context) {
	s.client.Close()
	s.Close(ctx)
}

// publishAgain reads the first message from the topic and sends it a second time, as a producer
// that missed an acknowledgement would.
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

// report waits until the consumer has handled three orders and the duplicate.
func (s *site) report(ctx context.Context, out io.Writer) error {
	if err := s.Handled(ctx, 4); err != nil {
		return err
	}
	var orders, invoices int
	if err := s.Pool.QueryRow(ctx, `SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM invoices)`).Scan(&orders, &invoices); err != nil {
		return fmt.Errorf("count: %w", err)
	}
	_, err := fmt.Fprintf(out, "%s\n%d orders, 4 messages (one of them twice), %d invoices\n", s.Servers, orders, invoices)
	return err
}

func toJSON(order Order) []byte {
	body, err := json.Marshal(order)
	if err != nil {
		panic(err) // a struct of a string and a number
	}
	return body
}
