// Quickstart: an order service, the relay and a consumer in one program.
//
//	go run ./examples/quickstart
//
// It needs only Go. With DATABASE_URL and KAFKA_BROKERS it uses those servers, with its own schema
// (effectonce_quickstart), which it creates, and its own topic.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, os.Getenv("DATABASE_URL")); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

// Order is what the service stores and publishes.
type Order struct {
	ID     string `json:"id"`
	Amount int    `json:"amount"`
}

// placeOrder stores an order and publishes its event in one transaction: both, or neither.
func placeOrder(ctx context.Context, pool *pgxpool.Pool, box *outbox.Outbox, topic string, order Order) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `INSERT INTO orders (id, amount) VALUES ($1, $2)`, order.ID, order.Amount); err != nil {
			return err
		}
		return box.Publish(ctx, tx, outbox.Message{Topic: topic, Key: []byte(order.ID), Payload: toJSON(order)})
	})
}

// invoice has its effect once for each order, however often the message comes or the process dies.
func invoice(ctx context.Context, tx pgx.Tx, _ *consumer.Message, order Order) error {
	_, err := tx.Exec(ctx, `INSERT INTO invoices (order_id, amount) VALUES ($1, $2)`, order.ID, order.Amount)
	return err
}

// start runs the relay and the consumer until ctx ends. Usually they are programs of their own.
func start(ctx context.Context, pool *pgxpool.Pool, brokers []string, topic string) (wait func() error, err error) {
	kafka := []kgo.Opt{kgo.SeedBrokers(brokers...)}
	r, err := relay.New(pool, kafka, relay.Config{Schema: schema})
	if err != nil {
		return nil, err
	}
	c, err := consumer.New(pool, kafka, consumer.JSON(invoice), consumer.Config{
		Schema: schema,
		Group:  "billing-" + topic,
		Topics: []string{topic},
	})
	if err != nil {
		return nil, err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return r.Run(ctx) })
	group.Go(func() error { return c.Run(ctx) })
	return group.Wait, nil
}

// run places three orders, sends one of the messages again under its ID, and counts the invoices.
func run(ctx context.Context, out io.Writer, databaseURL string) error {
	s, err := openSite(ctx, databaseURL)
	if err != nil {
		return err
	}
	defer s.close(ctx)
	working, stop := context.WithCancel(ctx)
	wait, err := start(working, s.Pool, s.Brokers, s.Topic)
	if err != nil {
		stop()
		return err
	}
	for i := 1; i <= 3 && err == nil; i++ {
		err = placeOrder(ctx, s.Pool, s.box, s.Topic, Order{ID: fmt.Sprintf("order-%d", i), Amount: 100 * i})
	}
	if err == nil {
		err = s.publishAgain(ctx)
	}
	if err == nil {
		err = s.report(ctx, out)
	}
	stop()
	if stopErr := wait(); err == nil {
		err = stopErr
	}
	return err
}
