// Command outbox-relay publishes the rows of the outbox table to Kafka, and is the operator's tool for
// the pipeline.
//
//	outbox-relay migrate up      # bring the tables
//	outbox-relay doctor          # is everything there that it needs?
//	outbox-relay run             # publish, until SIGTERM
//	outbox-relay status          # what waits, who relays, how consumers go
//	outbox-relay explain ID      # where a message is
//	outbox-relay verify          # outbox against topics against claims
//	outbox-relay parked list     # messages that could not be handled
//
// Every flag can be set by an environment variable: --database-url by OUTBOX_DATABASE_URL (or
// DATABASE_URL), --brokers by OUTBOX_BROKERS (or KAFKA_BROKERS), --lease by OUTBOX_LEASE and so on.
//
// Exit status: 0 done, 1 what was asked about is not well or failed, 2 wrong use.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	os.Exit(program())
}

func program() int {
	asked, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// The first signal asks; the second one ends the process at once. Commands hear of the first only when the
	// second would already work, so that what they say about it is true.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	context.AfterFunc(asked, func() {
		stop()
		cancel()
	})
	return execute(ctx, os.Args[1:], os.LookupEnv, os.Stdout, os.Stderr)
}
