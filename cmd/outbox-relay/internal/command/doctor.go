package command

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// doctorOptions are the flags of the command.
type doctorOptions struct {
	limit         time.Duration
	lagAgeMax     time.Duration
	progressTopic string
	topicPrefix   string
}

// defaultProgressTopic is relay.Config's.
const defaultProgressTopic = "effectonce-relay-progress"

func newDoctor(s *cli.Settings) *cobra.Command {
	options := doctorOptions{progressTopic: defaultProgressTopic}
	cmd := cli.AsksKafka(cli.Needs(&cobra.Command{
		Use:   "doctor",
		Short: "Check database, rights, brokers, topics and consumers, with a remedy for each problem",
		Long: `Check the setup and print a remedy for each problem. Run it with the relay's role and settings. It changes nothing.
Exit status 1 if a check fails; warnings do not count.

  status     what makes "outbox-relay status" not well, and its notes
  database   connection, pooler, durability, rights, tables; functions, triggers and constraints that differ from the
             release
  blockers   long and prepared transactions, replication slots
  outbox     limited roles
  consumers  dedup windows against topic retention, parked messages without a partition, positions of groups that are
             gone
  requests   idempotency keys that wait for a decision, a completer or a reaper
  Kafka      brokers, and the topics that rows and consumers name`,
		Example: `  outbox-relay doctor
  outbox-relay doctor --json | jq -r '.findings[] | select(.severity != "ok") | .remedy'`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			findings := examine(cmd.Context(), s, options)
			well := doctor.Well(findings)
			return answer(cmd.OutOrStdout(), s.JSON, map[string]any{"well": well, "findings": findings}, findingsText(findings), well)
		},
	}, cli.FlagDatabaseURL))
	cli.AddDuration(cmd.Flags(), &options.limit, "timeout", 5*time.Second, 10*time.Millisecond, time.Minute, "time limit for the database, and again for the brokers")
	addLagAgeMax(cmd.Flags(), &options.lagAgeMax)
	cli.AddText(cmd.Flags(), "progress-topic", 249, "topic of the progress of \"run --exactly-once\"; default: "+defaultProgressTopic, func(name string) error { options.progressTopic = name; return nil })
	addTopicPrefix(cmd.Flags(), &options.topicPrefix)
	s.AddJSON(cmd)
	return cmd
}

// examine runs the checks, and skips those that earlier failures make impossible.
func examine(ctx context.Context, s *cli.Settings, options doctorOptions) []doctor.Finding {
	limited, cancel := context.WithTimeout(ctx, options.limit)
	defer cancel()
	var findings []doctor.Finding
	conn, err := s.Connect(limited)
	if err != nil {
		findings = append(findings, doctor.Finding{
			Check: "database", Severity: doctor.Fail, Message: err.Error(),
			Remedy: "set --database-url to a running PostgreSQL that admits this role",
		})
		return append(findings, examineKafka(ctx, s, nil, options)...)
	}
	defer cli.HangUp(ctx, conn)
	findings = append(findings, doctor.Finding{Check: "database", Severity: doctor.OK, Message: s.Target() + " answers"})
	findings = append(findings, doctor.Pooler(limited, s.Connect)...)
	findings = append(findings, doctor.Server(limited, conn)...)
	findings = append(findings, doctor.Durability(limited, conn)...)
	findings = append(findings, doctor.OpenTransactions(limited, conn)...)
	findings = append(findings, doctor.ReplicationSlots(limited, conn)...)
	tables := doctor.Rights(limited, conn, s.Schema)
	if doctor.Well(tables) {
		tables = append(tables, doctor.Schema(limited, conn, s.Schema)...)
	}
	findings = append(findings, tables...)
	if !doctor.Well(tables) {
		return append(findings, examineKafka(ctx, s, nil, options)...)
	}
	findings = append(findings, doctor.Sequence(limited, conn, s.Schema)...)
	findings = append(findings, doctor.Definitions(limited, conn, s.Schema)...)
	findings = append(findings, doctor.IdempotencyKeys(limited, conn, s.Schema)...)
	findings = append(findings, doctor.Pipeline(limited, conn, s.Schema, options.lagAgeMax)...)
	return append(findings, examineKafka(ctx, s, conn, options)...)
}

// examineKafka skips the topics if the database could not be read: db is nil then.
func examineKafka(ctx context.Context, s *cli.Settings, db operator.Querier, options doctorOptions) (findings []doctor.Finding) {
	if len(s.Brokers) == 0 {
		return []doctor.Finding{{
			Check: "brokers", Severity: doctor.Warn, Message: "not checked: no brokers were given",
			Remedy: "give --brokers, or set OUTBOX_BROKERS or KAFKA_BROKERS",
		}}
	}
	err := s.AskKafka(ctx, options.limit, func(limited context.Context, client *kgo.Client) error {
		admin := kadm.NewClient(client)
		findings = doctor.Brokers(limited, admin, strings.Join(s.Brokers, ","))
		if db != nil && doctor.Well(findings) {
			findings = append(findings, doctor.Topics(limited, db, admin, s.Schema, options.topicPrefix)...)
			findings = append(findings, doctor.ProgressTopic(limited, admin, options.progressTopic)...)
			findings = append(findings, doctor.Consumers(limited, db, admin, s.Schema)...)
		}
		return nil
	})
	if err != nil {
		return []doctor.Finding{{Check: "brokers", Severity: doctor.Fail, Message: err.Error(), Remedy: "fix the Kafka flags"}}
	}
	return findings
}

func findingsText(findings []doctor.Finding) string {
	var text strings.Builder
	for _, f := range findings {
		terminal.Add(&text, "%-4s  %s: %s\n", f.Severity, f.Check, f.Message)
		if f.Remedy != "" {
			terminal.Add(&text, "      remedy: %s\n", f.Remedy)
		}
	}
	return text.String()
}
