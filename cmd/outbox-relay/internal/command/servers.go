//go:build !lean

package command

import (
	"context"
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
	if err == nil {
		err = created.Error()
	}
	if err != nil {
		return fmt.Errorf("create topics: %w", err)
	}
	return nil
}
