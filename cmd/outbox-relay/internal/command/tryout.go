//go:build !lean

package command

import (
	"context"
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/internal/servers"
)

// tryout returns the constructors of the commands that bring servers of their own. The build tag
// "lean" leaves them out, and with them embedded PostgreSQL, kfake and testcontainers.
func tryout() []func(*cli.Settings) *cobra.Command {
	return []func(*cli.Settings) *cobra.Command{newDemo, newServers, newBench}
}

// started are a PostgreSQL and a Kafka to try something out.
type started struct {
	postgres *servers.Postgres
	kafka    *servers.Kafka
}

// startServers takes the servers whose addresses are given, else embedded ones.
func startServers(ctx context.Context, s *cli.Settings, parameters map[string]string, say func(line string)) (*started, error) {
	say("starting the servers (the first run downloads PostgreSQL)")
	address, err := s.DatabaseAddress()
	if err != nil {
		return nil, err
	}
	return start(ctx, servers.PostgresOptions{DatabaseURL: address, Embedded: !s.HasDatabase(), Parameters: parameters},
		servers.KafkaOptions{Brokers: s.Brokers, Embedded: len(s.Brokers) == 0}, say)
}

func start(ctx context.Context, p servers.PostgresOptions, k servers.KafkaOptions, say func(line string)) (on *started, err error) {
	on = &started{}
	if on.postgres, err = servers.StartPostgres(ctx, p); err != nil {
		return nil, err
	}
	if on.kafka, err = servers.StartKafka(ctx, k); err != nil {
		on.stop(ctx, &err)
		return nil, err
	}
	say(on.postgres.Description)
	say(on.kafka.Description)
	return on, nil
}

// stopMax is how long the embedded servers may take to stop.
const stopMax = 20 * time.Second

// stop stops the servers, also after an interrupt.
func (on *started) stop(ctx context.Context, err *error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopMax)
	defer cancel()
	if on.kafka != nil {
		*err = errors.Join(*err, on.kafka.Stop(ctx))
	}
	*err = errors.Join(*err, on.postgres.Stop(ctx))
}
