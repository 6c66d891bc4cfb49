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
	"os"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/command"
)

func main() {
	os.Exit(command.Program())
}
