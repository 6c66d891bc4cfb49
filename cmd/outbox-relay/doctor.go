package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/effectonce/effectonce/internal/doctor"
	"github.com/effectonce/effectonce/relay"
)

type doctorReport struct {
	Well     bool             `json:"well"`
	Findings []doctor.Finding `json:"findings"`
}

// doctorOptions are the flags of the command.
type doctorOptions struct {
	limit, keep   time.Duration
	progressTopic string
	routes        relay.Routes
	backlog       backlogLimits
}

// defaultProgressTopic is relay.Config's.
const defaultProgressTopic = "effectonce-relay-progress"

func newDoctor(s *settings) *cobra.Command {
	var asJSON bool
	options := doctorOptions{progressTopic: defaultProgressTopic}
	cmd := needs(&cobra.Command{
		Use:   "doctor",
		Short: "Check database, rights, brokers, topics and consumers, with a remedy for what is wrong",
		Long: `Check the database, the rights of its role, the brokers, the topics that rows name, and how consumers go:
partitions that do not move, topics that are paused or do not exist, the rule for IDs, dedup windows against the
retention of topics, parked messages, positions of groups that are gone, and sequences that went back. Of the database also what holds others up: long and prepared transactions, replication slots, autovacuum, relays by an
old name, slots of the outbox that do not take turns, messages for later that are overdue, a pooler between. And
of requests by their idempotency keys those that wait for a decision, for a completer or for a reaper.
Nothing is changed. Run it as the role, and with the settings, that the relay uses. Exit status 1 if a check fails; a warning is none.`,
		Example: `  outbox-relay doctor
  outbox-relay doctor --json | jq -r '.findings[] | select(.severity != "ok") | .remedy'`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			findings := s.examine(cmd.Context(), options)
			report := doctorReport{Well: doctor.Well(findings), Findings: findings}
			var err error
			if asJSON {
				err = printJSON(cmd.OutOrStdout(), report)
			} else {
				err = printFindings(cmd.OutOrStdout(), findings)
			}
			if err == nil && !report.Well {
				return errNotWell
			}
			return err
		},
	}, flagDatabaseURL)
	addDuration(cmd.Flags(), &options.limit, "timeout", 5*time.Second, 10*time.Millisecond, time.Minute, "how long each of database and brokers may take for an answer")
	addDuration(cmd.Flags(), &options.keep, "keep", 10*time.Minute, time.Second, 30*24*time.Hour, "how long the relay keeps published rows, as \"run\" was told")
	addText(cmd.Flags(), "progress-topic", 249, "where \"run --exactly-once\" keeps progress; default: "+defaultProgressTopic, func(name string) error { options.progressTopic = name; return nil })
	addRoutes(cmd.Flags(), &options.routes)
	options.backlog.addFlags(cmd.Flags())
	addJSON(cmd, &asJSON)
	return cmd
}

// examine runs every check that what it found before allows.
func (s *settings) examine(ctx context.Context, options doctorOptions) []doctor.Finding {
	limited, cancel := context.WithTimeout(ctx, options.limit)
	defer cancel()
	var findings []doctor.Finding
	conn, err := s.connect(limited)
	if err != nil {
		findings = append(findings, doctor.Finding{
			Check: "database", Severity: doctor.Fail, Message: err.Error(),
			Remedy: "let --database-url name a PostgreSQL that runs and lets this role in",
		})
		return append(findings, s.examineKafka(ctx, nil, options)...)
	}
	defer hangUp(ctx, conn)
	findings = append(findings, doctor.Finding{Check: "database", Severity: doctor.OK, Message: s.target() + " answers"})
	findings = append(findings, doctor.Pooler(limited, s.connect)...)
	findings = append(findings, doctor.Server(limited, conn)...)
	findings = append(findings, doctor.Durability(limited, conn)...)
	findings = append(findings, doctor.Clock(limited, conn)...)
	findings = append(findings, doctor.OpenTransactions(limited, conn)...)
	findings = append(findings, doctor.ReplicationSlots(limited, conn)...)
	tables := doctor.Rights(limited, conn, s.schema)
	if doctor.Well(tables) {
		tables = append(tables, doctor.Schema(limited, conn, s.schema)...)
	}
	findings = append(findings, tables...)
	if !doctor.Well(tables) {
		return append(findings, s.examineKafka(ctx, nil, options)...)
	}
	findings = append(findings, doctor.Sequence(limited, conn, s.schema)...)
	findings = append(findings, doctor.Sequences(limited, conn, s.schema)...)
	findings = append(findings, doctor.Autovacuum(limited, conn, s.schema)...)
	findings = append(findings, doctor.Relays(limited, conn, s.schema)...)
	findings = append(findings, doctor.Replicas(limited, conn, s.schema)...)
	findings = append(findings, doctor.Slots(limited, conn, s.schema, options.keep)...)
	findings = append(findings, doctor.BacklogLimits(limited, conn, s.schema, doctor.Limits{Age: options.backlog.age, Bytes: options.backlog.bytes()})...)
	findings = append(findings, doctor.Later(limited, conn, s.schema)...)
	findings = append(findings, doctor.IdempotencyKeys(limited, conn, s.schema)...)
	findings = append(findings, doctor.Consuming(limited, conn, s.schema)...)
	return append(findings, s.examineKafka(ctx, conn, options)...)
}

// examineKafka leaves the topics out where the database could not be read: db is nil then.
func (s *settings) examineKafka(ctx context.Context, db doctor.Querier, options doctorOptions) []doctor.Finding {
	if len(s.brokers) == 0 {
		return []doctor.Finding{{
			Check: "brokers", Severity: doctor.Warn, Message: "not checked: no brokers were given",
			Remedy: "give --brokers, or set OUTBOX_BROKERS or KAFKA_BROKERS",
		}}
	}
	client, err := s.askKafka(options.limit)
	if err != nil {
		return []doctor.Finding{{Check: "brokers", Severity: doctor.Fail, Message: err.Error(), Remedy: "mend the settings of the client"}}
	}
	defer client.Close()
	limited, cancel := context.WithTimeout(ctx, options.limit)
	defer cancel()
	admin := kadm.NewClient(client)
	findings := doctor.Brokers(limited, admin, strings.Join(s.brokers, ","))
	if db == nil || !doctor.Well(findings) {
		return findings
	}
	findings = append(findings, doctor.MessageSize(limited, admin)...)
	findings = append(findings, doctor.Topics(limited, db, admin, s.schema, options.routes)...)
	findings = append(findings, doctor.ProgressTopic(limited, admin, options.progressTopic)...)
	return append(findings, doctor.Consumers(limited, db, admin, s.schema)...)
}

func printFindings(out io.Writer, findings []doctor.Finding) error {
	var text strings.Builder
	for _, f := range findings {
		fmt.Fprintf(&text, "%-4s  %s: %s\n", f.Severity, printable(f.Check), printable(f.Message))
		if f.Remedy != "" {
			fmt.Fprintf(&text, "      remedy: %s\n", printable(f.Remedy))
		}
	}
	_, err := io.WriteString(out, text.String())
	return err
}
