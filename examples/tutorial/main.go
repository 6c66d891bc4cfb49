// Tutorial: the README's program, with a publisher and a consumer in one. It is built in a module
// of its own.
package main

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/outbox"
)

type Order struct {
	ID     string
	Amount int
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Getenv("DATABASE_URL"), strings.Split(os.Getenv("KAFKA_BROKERS"), ",")); err != nil {
		slog.Error("tutorial ended", "error", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, databaseURL string, brokers []string) error {
	pool, err := pgxpool.New(ctx, databaseURL)
	if err != nil {
		return err
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, `CREATE TABLE IF NOT EXISTS invoices (order_id text, amount int)`); err != nil {
		return err
	}
	// Publish: the message is in the outbox if this transaction commits. Its ID names the order.
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		return outbox.Publish(ctx, tx, outbox.Message{
			ID: dedup.MessageID("shop", []byte("order-1")), Topic: "orders", Key: []byte("order-1"), Payload: []byte(`{"ID": "order-1", "Amount": 100}`),
		})
	})
	if err != nil {
		return err
	}
	// Consume: the invoice commits together with the claim of the message's ID.
	invoice := consumer.JSON(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message, order Order) error {
		slog.Info("invoicing", "order", order.ID, "message", msg.ID)
		_, err := tx.Exec(ctx, `INSERT INTO invoices (order_id, amount) VALUES ($1, $2)`, order.ID, order.Amount)
		return err
	})
	c, err := consumer.New(pool, []kgo.Opt{kgo.SeedBrokers(brokers...)}, invoice, consumer.Config{
		Group: "billing", Topics: []string{"orders"}, Logger: slog.Default(),
	})
	if err != nil {
		return err
	}
	return c.Run(ctx)
}
