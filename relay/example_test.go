package relay_test

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/relay"
)

// A program that runs one replica of the relay until it gets SIGINT or SIGTERM. Start as many as
// you like: they share the work.
func ExampleNew() {
	run := func(databaseURL, brokers string) error {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		pool, err := pgxpool.New(ctx, databaseURL)
		if err != nil {
			return err
		}
		defer pool.Close()
		kafka := []kgo.Opt{
			kgo.SeedBrokers(strings.Split(brokers, ",")...),
			kgo.ProducerBatchCompression(kgo.ZstdCompression()),
		}
		r, err := relay.New(pool, kafka, relay.Config{
			ExactlyOnce: true,
			Logger:      slog.Default(),
			Hooks: relay.Hooks{
				Dead: func(topic string, reason relay.Reason) { slog.Error("dead row", "topic", topic, "reason", reason) },
			},
		})
		if err != nil {
			return err
		}
		return r.Run(ctx) // drains and returns nil after the signal
	}
	_ = run
}
