// Command outbox-relay publishes the rows of the outbox table to Kafka, and is the operator's tool
// for the pipeline.
//
//	outbox-relay migrate up      # create or upgrade the tables
//	outbox-relay doctor          # check the setup
//	outbox-relay run             # publish, until SIGTERM
//	outbox-relay status          # backlog, replicas, consumers
//	outbox-relay explain ID      # where a message is
//	outbox-relay verify          # compare outbox, topics and claims
//	outbox-relay parked list     # messages that could not be handled
//
// Flags can be set by environment variables: --database-url by OUTBOX_DATABASE_URL (or
// DATABASE_URL), --brokers by OUTBOX_BROKERS (or KAFKA_BROKERS), --lease by OUTBOX_LEASE and so on.
// Flags that choose what a command changes have no variable.
//
// Exit status: 0 success, 1 not well or failed, 2 wrong use.
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
	// The first signal asks the command to stop; the second one ends the process at once. The
	// default handling is restored before the command sees the first signal, so that its log line
	// about the second one is true.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	context.AfterFunc(asked, func() {
		stop()
		cancel()
	})
	return execute(ctx, os.Args[1:], os.LookupEnv, os.Stdout, os.Stderr)
}
