// Kafka starts the Kafka that all tests of a run share, prints its address and stops it on SIGTERM.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/effectonce/effectonce/internal/servers"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "the Kafka of all tests:", err)
		os.Exit(1)
	}
}

func run() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	kafka, err := servers.StartKafka(ctx, servers.KafkaOptions{Own: true})
	if err != nil {
		return err
	}
	fmt.Println(kafka.Brokers[0])
	<-ctx.Done()
	return kafka.Stop(context.WithoutCancel(ctx))
}
