//go:build !lean

package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/internal/servers"
)

// topicWait bounds the creation of topics on a server that was just started.
const topicWait = 30 * time.Second

func newServers(*cli.Settings) *cobra.Command {
	var topics []string
	cmd := &cobra.Command{
		Use:   "servers",
		Short: "Start a PostgreSQL and a Kafka to try things out, until Ctrl-C",
		Long: `Start a PostgreSQL and an in-process Kafka on free ports of the loopback address, and print their addresses as
shell variables. Ctrl-C or SIGTERM stops both and deletes their data. The first run downloads PostgreSQL. For
trying out and tests, never for production: no TLS, no replication, and the Kafka keeps everything in memory.`,
		Example: `  outbox-relay servers --topic orders`,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			ctx := cmd.Context()
			on, err := start(ctx, servers.PostgresOptions{Own: true, Embedded: true}, servers.KafkaOptions{Own: true, Embedded: true}, func(line string) {
				_ = terminal.Say(cmd.ErrOrStderr(), "%s\n", line) // a failed write does not stop them
			})
			if err != nil {
				return err
			}
			defer on.stop(ctx, &err)
			if err := createTopics(ctx, on.kafka.Brokers, topics); err != nil {
				return err
			}
			if err := terminal.Say(cmd.OutOrStdout(), "export DATABASE_URL='%s' KAFKA_BROKERS='%s'\n", on.postgres.URL, on.kafka.Brokers[0]); err != nil {
				return err
			}
			if err := terminal.Say(cmd.ErrOrStderr(), "Ctrl-C stops both and deletes their data\n"); err != nil {
				return err
			}
			<-ctx.Done()
			return nil
		},
	}
	cmd.Flags().StringSliceVar(&topics, "topic", nil, "create this topic, with three partitions; may be repeated")
	return cmd
}

// createTopics creates topics with three partitions each.
func createTopics(ctx context.Context, brokers, topics []string) error {
	if len(topics) == 0 {
		return nil
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...))
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, topicWait)
	defer cancel()
	created, err := kadm.NewClient(client).CreateTopics(ctx, 3, 1, nil, topics...)
	if err = cmp.Or(err, created.Error()); err != nil {
		return fmt.Errorf("create topics: %w", err)
	}
	return nil
}

// tryout returns the constructors of the commands that bring servers of their own. The build tag
// "lean" leaves them out, and with them embedded PostgreSQL, kfake and testcontainers.
func tryout() []func(*cli.Settings) *cobra.Command {
	return []func(*cli.Settings) *cobra.Command{newDemo, newTorture, newServers, newBench}
}

// started are a PostgreSQL and a Kafka to try something out.
type started struct {
	postgres *servers.Postgres
	kafka    *servers.Kafka
}

// startServers takes the servers whose addresses are given, else embedded ones.
func startServers(ctx context.Context, s *cli.Settings, parameters map[string]string, say func(line string)) (*started, error) {
	say("starting the servers (the first run downloads PostgreSQL)")
	return start(ctx, servers.PostgresOptions{DatabaseURL: s.DatabaseAddress(), Embedded: !s.HasDatabase(), Parameters: parameters},
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
