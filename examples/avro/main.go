// Avro: a consumer whose messages are Avro, with the schemas in a schema registry.
//
//	go run ./examples/avro
//
// The interesting part is decoder.go: it distinguishes what the registry reports about a message
// from an unavailable registry. The example needs only Go. With DATABASE_URL and KAFKA_BROKERS it
// uses those servers, with its own schema (effectonce_avro), which it creates, and its own topic.
// The registry always runs in this process.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/avro"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sr"

	"github.com/effectonce/effectonce/consumer"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, os.Getenv("DATABASE_URL")); err != nil {
		fmt.Fprintln(os.Stderr, "avro:", err)
		os.Exit(1)
	}
}

// Two versions of an order. The consumer reads both as the second one.
const (
	orderV1 = `{"type": "record", "name": "Order", "fields": [
		{"name": "id", "type": "string"},
		{"name": "cents", "type": "long"}]}`
	orderV2 = `{"type": "record", "name": "Order", "fields": [
		{"name": "id", "type": "string"},
		{"name": "cents", "type": "long"},
		{"name": "currency", "type": "string", "default": "EUR"}]}`
)

// Order is what the consumer works with.
type Order struct {
	ID       string `avro:"id"`
	Cents    int64  `avro:"cents"`
	Currency string `avro:"currency"`
}

// invoice has its effect once for each order.
func invoice(ctx context.Context, tx pgx.Tx, _ *consumer.Message, order Order) error {
	_, err := tx.Exec(ctx, `INSERT INTO invoices (order_id, cents, currency) VALUES ($1, $2, $3)`, order.ID, order.Cents, order.Currency)
	return err
}

// run sends orders of both versions, one with an unregistered schema and one that is not Avro,
// while the registry is unavailable at first, and counts the results.
func run(ctx context.Context, out io.Writer, databaseURL string) error {
	s, err := openSite(ctx, databaseURL)
	if err != nil {
		return err
	}
	defer s.close(ctx)
	v1, err := s.register(orderV1)
	if err != nil {
		return err
	}
	v2, err := s.register(orderV2)
	if err != nil {
		return err
	}
	orders, err := newDecoder[Order](s.schemas, orderV2)
	if err != nil {
		return err
	}
	c, err := consumer.New(s.Pool, s.Kafka(), consumer.Decode(orders, invoice), consumer.Config{
		Schema: schema, Group: "billing-" + s.Topic, Topics: []string{s.Topic}, ParkShareMax: 1, // half of these messages are bad on purpose
	})
	if err != nil {
		return err
	}
	for _, value := range [][]byte{
		encode(v1, orderV1, Order{ID: "order-1", Cents: 100}),
		encode(v2, orderV2, Order{ID: "order-2", Cents: 200, Currency: "CHF"}),
		encode(4711, orderV2, Order{ID: "order-3"}),
		[]byte("no Avro"),
	} {
		if err := s.send(ctx, value); err != nil {
			return err
		}
	}
	working, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- c.Run(working) }()
	err = s.report(ctx, out)
	stop()
	if stopErr := <-done; err == nil {
		err = stopErr
	}
	return err
}

// encode encodes an order as a producer does.
func encode(id int, schema string, order Order) []byte {
	parsed := avro.MustParse(schema) // a constant
	value, err := sr.Encode(order, new(sr.ConfluentHeader), id, nil, func(v any) ([]byte, error) { return parsed.Encode(v) })
	if err != nil {
		panic(err) // a struct of strings and a number
	}
	return value
}

func (s *site) send(ctx context.Context, value []byte) error {
	id, err := uuid.NewV7()
	if err != nil {
		return err
	}
	return s.client.ProduceSync(ctx, &kgo.Record{
		Topic: s.Topic, Value: value, Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte(id.String())}},
	}).FirstErr()
}
