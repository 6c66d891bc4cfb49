package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/relays"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/relay"
)

func newTopics(s *cli.Settings) *cobra.Command {
	return group(&cobra.Command{
		Use:   "topics",
		Short: "Pause and resume topics",
		Long: `Pause and resume topics. The rows of a paused topic, and the rows behind them in their keys, wait in outbox_dead; all
other topics continue. After a resume they are published in order.

  outbox-relay topics pause orders --why "consumer has a bug, see INC-12"
  outbox-relay topics resume orders`,
	}, newTopicsPause(s), newTopicsResume(s), newTopicsList(s))
}

// ofRelay runs work on the schema, for a relay that is known. The time limit includes wait.
func ofRelay(ctx context.Context, s *cli.Settings, by operator.By, wait time.Duration, work func(ctx context.Context, pool *pgxpool.Pool, by relay.Operator) error) error {
	return s.OnSchemaFor(ctx, cli.ChangeMax+wait, func(ctx context.Context, pool *pgxpool.Pool) error {
		if err := knowsRelay(ctx, s, pool); err != nil {
			return err
		}
		return work(ctx, pool, relayOperator(s, by))
	})
}

func relayOperator(s *cli.Settings, by operator.By) relay.Operator {
	return relay.Operator{Schema: s.Schema, Relay: s.Relay, Who: by.Who, Why: by.Why}
}

func newTopicsPause(s *cli.Settings) *cobra.Command {
	var by operator.By
	var wait time.Duration
	var force bool
	cmd := cli.AsksKafka(cli.Needs(&cobra.Command{
		Use:   "pause TOPIC...",
		Short: "Stop publishing topics",
		Long: `Stop publishing topics: their rows wait. It returns once every running replica has confirmed that rows read before are
acknowledged by Kafka, or wait. That takes at most six seconds; longer while Kafka does not acknowledge, or after a
replica died (until its lease ends).

Exit status 1 if the pause is not confirmed within --wait, or if no replica runs. The pause is stored anyway, holds once
a replica obeys it, and is recorded. "outbox-relay topics resume" ends it.

A topic that has no rows and does not exist in Kafka is refused without --force: its name may be misspelt. Without
--brokers only its rows count.`,
		Args: cli.Arguments("at least one topic", 1, math.MaxInt),
		RunE: func(cmd *cobra.Command, topics []string) error {
			return ofRelay(cmd.Context(), s, by, wait, func(ctx context.Context, pool *pgxpool.Pool, by relay.Operator) error {
				if !force {
					if err := refuseUnknown(ctx, s, pool, by, topics); err != nil {
						return err
					}
				}
				changed, err := relay.Pause(ctx, pool, by, wait, topics...)
				var unconfirmed *relay.UnconfirmedError
				if err != nil && !errors.As(err, &unconfirmed) {
					return err
				}
				p := pausing{Paused: append([]string{}, changed...), Holds: wait > 0 && err == nil}
				if unconfirmed != nil {
					p.Unconfirmed, p.interrupted = unconfirmed.Owners, ctx.Err() != nil
				}
				return p.print(cmd.OutOrStdout(), len(topics), wait, s.JSON)
			})
		},
	}, cli.FlagDatabaseURL))
	addBy(s, cmd, &by, "by hand")
	cli.AddDuration(cmd.Flags(), &wait, "wait", 30*time.Second, 0, 10*time.Minute, "how long to wait until the pause holds; 0s: no wait")
	cli.AddBool(cmd.Flags(), &force, "force", "also pause topics that neither exist nor have rows")
	cli.CommandLineOnly(cmd.Flags(), "force")
	return cmd
}

// pausing is what "topics pause" did.
type pausing struct {
	Paused []string `json:"paused"`
	Holds  bool     `json:"holds"`
	// Unconfirmed are the replicas that did not confirm. If it is empty and Holds is false, no
	// replica runs, or the command did not wait.
	Unconfirmed []string `json:"unconfirmed,omitempty"`

	interrupted bool // before the wait was over
}

func (p *pausing) print(out io.Writer, topics int, wait time.Duration, asJSON bool) error {
	text := human.Count(topics, "topic") + " paused"
	if before := topics - len(p.Paused); before > 0 {
		text += fmt.Sprintf(", %d of them before", before)
	}
	switch {
	case wait == 0:
		text += "; did not wait until the pause holds"
	case p.Holds:
		text += "; the pause holds"
	case len(p.Unconfirmed) == 0:
		text += "; no replica of the relay runs: the pause is stored, and holds once one runs"
	default:
		limit := fmt.Sprintf("within %s by %s", human.Duration(wait), terminal.Plain(strings.Join(p.Unconfirmed, ", ")))
		if p.interrupted { // perhaps before the replicas were known
			limit = "before the interruption"
		}
		text += fmt.Sprintf("; the pause was not confirmed %s: rows read before it may still be published; "+
			"it is stored, and \"outbox-relay topics pause\" with the same topics waits again", limit)
	}
	return answer(out, asJSON, p, terminal.Fill("%s\n", text), wait == 0 || p.Holds)
}

// refuseUnknown refuses topics that neither exist nor have rows. It asks Kafka first, which is
// faster.
func refuseUnknown(ctx context.Context, s *cli.Settings, pool *pgxpool.Pool, by relay.Operator, topics []string) error {
	unknown, where := topics, "; with --brokers Kafka is asked whether it exists"
	if len(s.Brokers) > 0 {
		missing, err := missingTopics(ctx, s, topics)
		if err != nil {
			where = fmt.Sprintf("; Kafka could not be asked (%v)", err)
		} else {
			unknown, where = missing, " and does not exist in Kafka"
		}
	}
	if len(unknown) == 0 {
		return nil
	}
	unknown, err := relay.WithoutRows(ctx, pool, by, unknown...)
	if err != nil {
		return fmt.Errorf("look for rows of the topics: %w; --force pauses without this check", err)
	}
	if len(unknown) > 0 {
		return fmt.Errorf("topic %s has no rows%s: nothing was paused; --force pauses it anyway", terminal.Plain(strings.Join(unknown, ", ")), where)
	}
	return nil
}

func newTopicsResume(s *cli.Settings) *cobra.Command {
	var by operator.By
	cmd := cli.Needs(&cobra.Command{
		Use:   "resume TOPIC...",
		Short: "Publish the rows of paused topics",
		Long:  `Publish the rows of paused topics, in order. The relay resumes within three seconds. The change is recorded.`,
		Args:  cli.Arguments("at least one topic", 1, math.MaxInt),
		RunE: func(cmd *cobra.Command, topics []string) error {
			return ofRelay(cmd.Context(), s, by, 0, func(ctx context.Context, pool *pgxpool.Pool, by relay.Operator) error {
				changed, err := relay.Resume(ctx, pool, by, topics...)
				if err != nil {
					return err
				}
				return say(cmd.OutOrStdout(), s.JSON, map[string]any{"resumed": append([]string{}, changed...)}, "%d of %s resumed\n", len(changed), human.Count(len(topics), "topic"))
			})
		},
	}, cli.FlagDatabaseURL)
	addBy(s, cmd, &by, "by hand")
	return cmd
}

// knowsRelay refuses an unknown relay name if other relays exist: no relay would see the change.
// Before the first relay runs, any name is allowed.
func knowsRelay(ctx context.Context, s *cli.Settings, pool *pgxpool.Pool) error {
	all, err := relays.List(ctx, pool, s.Schema)
	if err != nil {
		return err
	}
	var names []string
	for _, r := range all {
		if r.Relay == s.Relay {
			return nil
		}
		names = append(names, terminal.Plain(r.Relay))
	}
	if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("relay %s: %w; known: %s: give one with --relay", terminal.Plain(s.Relay), relay.ErrUnknownRelay, strings.Join(names, ", "))
}

func newTopicsList(s *cli.Settings) *cobra.Command {
	cmd := cli.Needs(&cobra.Command{
		Use:   "list",
		Short: "Show which topics are paused, since when and why",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return ofRelay(cmd.Context(), s, operator.By{}, 0, func(ctx context.Context, pool *pgxpool.Pool, of relay.Operator) error {
				paused, err := relay.PausedTopics(ctx, pool, of)
				if err != nil {
					return err
				}
				return list(cmd.OutOrStdout(), s.JSON, paused, "no paused topics", "topic\tsince\tby\twhy", func(p relay.PausedTopic) string {
					return terminal.Fill("%s\t%s\t%s\t%s", terminal.Plain(p.Topic), p.PausedAt.UTC().Format(time.RFC3339), terminal.Plain(p.Who), terminal.Plain(p.Why))
				})
			})
		},
	}, cli.FlagDatabaseURL)
	s.AddJSONLines(cmd)
	return cmd
}
