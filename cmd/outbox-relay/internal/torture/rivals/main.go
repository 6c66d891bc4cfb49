// Command rivals is what the torture run needs to play against Watermill and Debezium. It is a module
// of its own, so that their dependencies are not those of effectonce. Build it, and name it:
//
//	go -C cmd/outbox-relay/internal/torture/rivals build -o "$PWD/rivals" .
//	./rivals fetch
//	go run ./cmd/outbox-relay torture --rivals --rival-program ./rivals
//
// fetch downloads Debezium and Kafka Connect with Maven, into the user's cache directory.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/worker"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	command := ""
	if len(os.Args) == 2 {
		command = os.Args[1]
	}
	switch command {
	case "process":
		return worker.RunAs(ctx, os.Stdin, os.Stderr, func() { os.Exit(1) }, map[string]worker.Rival{
			rivalWatermill: watermillRival{}, rivalDebezium: debeziumRival{claims: true}, rivalDebeziumNaive: debeziumRival{},
		})
	case "describe":
		return json.NewEncoder(os.Stdout).Encode(describe())
	case "fetch":
		return fetch(ctx)
	case commandWatch:
		return watch(ctx, os.Stdin)
	default:
		return fmt.Errorf("want one of: process, describe, fetch")
	}
}

// Names of rivals.
const (
	rivalWatermill     = "watermill"
	rivalDebezium      = "debezium"
	rivalDebeziumNaive = "debezium-naive"
)

func describe() []scene.Description {
	missing := ""
	if err := debeziumReady(); err != nil {
		missing = err.Error()
	}
	return []scene.Description{
		{Name: rivalWatermill, Settings: watermillSettings()},
		{Name: rivalDebezium, Settings: debeziumSettings() + " The consumer is the textbook's, with claims of the event ID.", RelaysMax: 1, RealKafka: true, Missing: missing},
		{Name: rivalDebeziumNaive, Settings: "The same, and the consumer has no claims.", RelaysMax: 1, RealKafka: true, Missing: missing},
	}
}
