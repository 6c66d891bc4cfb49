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
)

type doctorReport struct {
	Well     bool             `json:"well"`
	Findings []doctor.Finding `json:"findings"`
}

func newDoctor(s *settings) *cobra.Command {
	var asJSON bool
	var limit time.Duration
	cmd := needs(&cobra.Command{
		Use:   "doctor",
		Short: "Check database, rights, brokers, topics and consumers, with a remedy for what is wrong",
		Long: `Check the database, the rights of its role, the brokers, the topics that rows name, and what consumers
left: dedup windows against the retention of topics, parked messages, positions of groups that are gone.
Nothing is changed. Run it as the role that the relay uses. Exit status 1 if a check fails.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			findings := s.examine(cmd.Context(), limit)
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
	addDuration(cmd.Flags(), &limit, "timeout", 5*time.Second, 10*time.Millisecond, time.Minute, "how long each of database and brokers may take for an answer")
	addJSON(cmd, &asJSON)
	return cmd
}

// examine runs every check that what it found before allows.
func (s *settings) examine(ctx context.Context, limit time.Duration) []doctor.Finding {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var findings []doctor.Finding
	conn, err := s.connect(limited)
	if err != nil {
		findings = append(findings, doctor.Finding{
			Check: "database", Severity: doctor.Fail, Message: err.Error(),
			Remedy: "let --database-url name a PostgreSQL that runs and lets this role in",
		})
		return append(findings, s.examineKafka(ctx, nil, limit)...)
	}
	defer hangUp(ctx, conn)
	findings = append(findings, doctor.Finding{Check: "database", Severity: doctor.OK, Message: s.target() + " answers"})
	findings = append(findings, doctor.Server(limited, conn)...)
	findings = append(findings, doctor.Durability(limited, conn)...)
	findings = append(findings, doctor.Clock(limited, conn)...)
	findings = append(findings, doctor.OpenTransactions(limited, conn)...)
	tables := doctor.Rights(limited, conn, s.schema)
	if doctor.Well(tables) {
		tables = append(tables, doctor.Schema(limited, conn, s.schema)...)
	}
	findings = append(findings, tables...)
	if !doctor.Well(tables) {
		return append(findings, s.examineKafka(ctx, nil, limit)...)
	}
	findings = append(findings, doctor.Sequence(limited, conn, s.schema)...)
	return append(findings, s.examineKafka(ctx, conn, limit)...)
}

// examineKafka leaves the topics out where the database could not be read: db is nil then.
func (s *settings) examineKafka(ctx context.Context, db doctor.Querier, limit time.Duration) []doctor.Finding {
	if len(s.brokers) == 0 {
		return []doctor.Finding{{
			Check: "brokers", Severity: doctor.Warn, Message: "not checked: no brokers were given",
			Remedy: "give --brokers, or set OUTBOX_BROKERS or KAFKA_BROKERS",
		}}
	}
	client, err := s.askKafka(limit)
	if err != nil {
		return []doctor.Finding{{Check: "brokers", Severity: doctor.Fail, Message: err.Error(), Remedy: "mend the settings of the client"}}
	}
	defer client.Close()
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	admin := kadm.NewClient(client)
	findings := doctor.Brokers(limited, admin, strings.Join(s.brokers, ","))
	if db == nil || !doctor.Well(findings) {
		return findings
	}
	findings = append(findings, doctor.Topics(limited, db, admin, s.schema)...)
	return append(findings, doctor.Consumers(limited, db, admin, s.schema)...)
}

func printFindings(out io.Writer, findings []doctor.Finding) error {
	var text strings.Builder
	for _, f := range findings {
		fmt.Fprintf(&text, "%-4s  %s: %s\n", f.Severity, f.Check, f.Message)
		if f.Remedy != "" {
			fmt.Fprintf(&text, "      remedy: %s\n", f.Remedy)
		}
	}
	_, err := io.WriteString(out, text.String())
	return err
}
