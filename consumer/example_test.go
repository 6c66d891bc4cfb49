package consumer_test

import (
	"context"
	"os"
	"os/signal"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
)

// order is the JSON value of a message of the topic orders.
type order struct {
	ID     string `json:"id"`
	Amount int    `json:"amount"`
}

// A handler gets the decoded message and the transaction. What it writes through tx commits
// together with the claim of the message's ID, or not at all.
func ExampleNew() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		panic(err)
	}
	defer pool.Close()

	handler := consumer.JSON(func(ctx context.Context, tx pgx.Tx, _ *consumer.Message, o order) error {
		_, err := tx.Exec(ctx, `INSERT INTO invoice (order_id, amount) VALUES ($1, $2)`, o.ID, o.Amount)
		return err
	})
	c, err := consumer.New(pool, []kgo.Opt{kgo.SeedBrokers("127.0.0.1:9092")}, handler, consumer.Config{
		Group:  "billing",
		Topics: []string{"orders"},
	})
	if err != nil {
		panic(err) // all problems of the configuration at once
	}
	// Run blocks until ctx is cancelled. Then it drains and returns nil.
	if err := c.Run(ctx); err != nil {
		panic(err)
	}
}

// A handler that only writes queues its statements. The consumer sends those of a whole batch in
// one round trip.
func ExampleQueued() {
	handler := consumer.Queued(func(_ context.Context, q *consumer.Queue, msg *consumer.Message) error {
		q.Queue(`INSERT INTO click (id, page) VALUES ($1, $2)`, msg.ID, string(msg.Value))
		return nil
	})
	var pool *pgxpool.Pool // pgxpool.New
	_, err := consumer.New(pool, []kgo.Opt{kgo.SeedBrokers("127.0.0.1:9092")}, handler, consumer.Config{
		Group:    "statistics",
		Topics:   []string{"clicks"},
		BatchMax: 1000,
	})
	if err != nil {
		panic(err)
	}
}

// A batch handler gets all fresh messages of a batch at once, for COPY and for statements over
// sets.
func ExampleBatch() {
	handler := consumer.Batch(func(ctx context.Context, tx pgx.Tx, msgs []*consumer.Message) error {
		_, err := tx.CopyFrom(ctx, pgx.Identifier{"click"}, []string{"id", "page"},
			pgx.CopyFromSlice(len(msgs), func(i int) ([]any, error) {
				return []any{msgs[i].ID, string(msgs[i].Value)}, nil
			}))
		return err
	})
	var pool *pgxpool.Pool // pgxpool.New
	_, err := consumer.New(pool, []kgo.Opt{kgo.SeedBrokers("127.0.0.1:9092")}, handler, consumer.Config{
		Group:  "statistics",
		Topics: []string{"clicks"},
	})
	if err != nil {
		panic(err)
	}
}
