package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/consumers"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
)

func newConsumer(s *cli.Settings) *cobra.Command {
	return group(&cobra.Command{
		Use:   "consumer",
		Short: "Pause topics for a group, move a partition's position, choose how messages get their IDs",
		Long: `Change what the consumers of a group do. Running consumers follow within seconds. Changes are recorded: see
"outbox-relay actions list".`,
	}, newConsumerPause(s), newConsumerResume(s), newConsumerResumeAt(s), newConsumerRule(s))
}

// consumerChange holds the flags of every change.
type consumerChange struct {
	operator.By
	consumers.Partition
}

// add adds the flags. otherwise is as for addBy.
func (c *consumerChange) add(s *cli.Settings, cmd *cobra.Command, otherwise string) {
	flags := cmd.Flags()
	cli.AddText(flags, "group", 255, "consumer group; required", func(text string) error { c.Group = text; return nil })
	cli.AddText(flags, "topic", 249, "topic; required", func(text string) error { c.Topic = text; return nil })
	addBy(s, cmd, &c.By, otherwise)
	cli.CommandLineOnly(flags, "group", "topic")
	s.Check(cmd, c.Validate)
}

// Validate returns all problems of the flags.
func (c *consumerChange) Validate() error {
	var problems []error
	if c.Group == "" {
		problems = append(problems, errors.New("--group is missing: see \"outbox-relay status\""))
	}
	if c.Topic == "" {
		problems = append(problems, errors.New("--topic is missing"))
	}
	return errors.Join(problems...)
}

func newConsumerPause(s *cli.Settings) *cobra.Command {
	var c consumerChange
	cmd := cli.Needs(&cobra.Command{
		Use:   "pause",
		Short: "Stop a group's consumers from reading a topic",
		Long: `Stop a group's consumers from reading a topic. They stop within seconds, after their batch; other topics continue.
The pause also holds for consumers that start later, until "consumer resume". Mind the topic's retention.`,
		Example: `  outbox-relay consumer pause --group billing --topic orders --why "provider is down, INC-12"`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.OnSchema(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool) error {
				pause, paused, err := consumers.PauseTopic(ctx, pool, s.Schema, c.By, c.Group, c.Topic)
				if err != nil {
					return err
				}
				text := "is being paused: consumers of group " + terminal.Plain(c.Group) + " finish their batch, and stop within some seconds"
				if !paused {
					text = "was paused already: " + pauseText(pause)
				}
				return say(cmd.OutOrStdout(), s.JSON, map[string]any{"paused": paused, "pause": pause}, "topic %s %s\n", terminal.Plain(c.Topic), text)
			})
		},
	}, cli.FlagDatabaseURL)
	c.add(s, cmd, "")
	return cmd
}

// pauseText says for which group a topic is paused, since when, by whom and why.
func pauseText(p consumers.Pause) string {
	return fmt.Sprintf("for group %s since %s by %s: %s", terminal.Plain(p.Group), p.PausedAt.UTC().Format(time.RFC3339), terminal.Clip(p.Who, keyWidth), terminal.Clip(p.Why, errorWidth))
}

func newConsumerResume(s *cli.Settings) *cobra.Command {
	var c consumerChange
	cmd := cli.Needs(&cobra.Command{
		Use:     "resume",
		Short:   "End the pause of a topic",
		Long:    "End the pause of a topic. The group's consumers continue at their positions within seconds.",
		Example: `  outbox-relay consumer resume --group billing --topic orders`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.OnSchema(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool) error {
				resumed, err := consumers.ResumeTopic(ctx, pool, s.Schema, c.By, c.Group, c.Topic)
				if err != nil {
					return err
				}
				text := "is resumed"
				if !resumed {
					text = "was not paused"
				}
				return say(cmd.OutOrStdout(), s.JSON, map[string]any{"resumed": resumed, "group": c.Group, "topic": c.Topic}, "topic %s %s for group %s\n", terminal.Plain(c.Topic), text, terminal.Plain(c.Group))
			})
		},
	}, cli.FlagDatabaseURL)
	c.add(s, cmd, "by hand")
	return cmd
}

const ruleLong = `Show the rule that gives messages their IDs, of one consumer or of all. With --set, change it.

  standard            message-id, ce_id (CloudEvents), and the headers of Debezium and Watermill if another of
                      their headers proves the origin
  standard+debezium   also id: for topics that Debezium's outbox event router writes
  standard+watermill  also _watermill_message_uuid: for topics that Watermill writes; can be combined with debezium
  headers:NAME,NAME   the first of these headers that a message has, at most 20

Stop all replicas first: each adopts the rule at its start, and while some have the old one, two copies of a message
may get two IDs, and both take effect. So --set is refused while a partition is held. The position of a process that was
killed looks held; --force is for that.

Messages handled before keep their claims under the old rule. They run again if the group is rewound past the
change, or if a producer sends another copy after it.`

func newConsumerRule(s *cli.Settings) *cobra.Command {
	var c consumerChange
	var rule string
	var force bool
	cmd := cli.Needs(&cobra.Command{
		Use:   "id-rule [NAME]",
		Short: "Show or change the rule that gives a consumer's messages their IDs",
		Long:  ruleLong,
		Example: `  outbox-relay consumer id-rule
  outbox-relay consumer id-rule billing/orders --set standard --why "all producers send message-id"`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case rule == "":
				return showRules(cmd, s, args)
			case len(args) == 0:
				return usageError{errors.New("--set needs the name of a consumer: see \"outbox-relay consumer id-rule\"")}
			}
			return s.OnSchema(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool) error {
				before, err := consumers.SetRule(ctx, pool, s.Schema, c.By, args[0], rule, force)
				if err != nil {
					return err
				}
				changed, text := before.IDRule != rule, terminal.Fill("consumer %s has the rule %s already\n", consumerText(before.Name), rule)
				if changed {
					text = terminal.Fill("consumer %s: from its next start on, the rule is %s (before: %s)\nWarning: %s\n", consumerText(before.Name), rule, before.IDRule, ruleWarning)
				}
				return answer(cmd.OutOrStdout(), s.JSON, map[string]any{"consumer": before.Name, "id_rule": rule, "before": before.IDRule, "changed": changed}, text, true)
			})
		},
	}, cli.FlagDatabaseURL)
	cli.AddText(cmd.Flags(), "set", 2048, "the new rule", func(text string) error { rule = text; return consumers.CheckRule(text) })
	s.Check(cmd, func() error {
		if rule != "" && c.Why == "" {
			return errors.New("--why is missing: say why the rule is changed")
		}
		return nil
	})
	addBy(s, cmd, &c.By, "not recorded: the rules are only shown")
	cmd.Flags().Lookup("why").Usage = "reason; required with --set"
	cli.AddBool(cmd.Flags(), &force, "force", "with --set: also while a partition looks held")
	cli.CommandLineOnly(cmd.Flags(), "set", "force")
	return cmd
}

func showRules(cmd *cobra.Command, s *cli.Settings, names []string) error {
	return s.OnSchema(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool) error {
		all, err := consumers.Registered(ctx, pool, s.Schema)
		if err == nil && len(names) > 0 {
			var one *consumers.Consumer
			if one, err = consumers.Rule(ctx, pool, s.Schema, names[0]); err == nil {
				all = []consumers.Consumer{*one}
			}
		}
		if err != nil {
			return err
		}
		return list(cmd.OutOrStdout(), s.JSON, all, "no consumers: none has registered yet", "consumer\tid rule", func(c consumers.Consumer) string {
			return consumerText(c.Name) + "\t" + terminal.Printable(c.IDRule)
		})
	})
}

const ruleWarning = "messages handled before keep their claims under the old rule: do not rewind the group past this moment, or they run again"

// resumeAt is the command that sets where a partition continues.
type resumeAt struct {
	consumerChange

	s              *cli.Settings
	at             int64
	given          bool
	cancel, dryRun bool
}

func newConsumerResumeAt(s *cli.Settings) *cobra.Command {
	r := &resumeAt{s: s}
	r.Partition.Partition = -1
	cmd := cli.AsksKafka(cli.Needs(&cobra.Command{
		Use:   "resume-at",
		Short: "Make a partition continue at another offset",
		Long: `Request that the holder of a partition, or its next holder, continues at another offset: at the start of the topic
(earliest), at its end (latest), or at a given offset. For halted partitions; "outbox-relay positions" says why one
halted. The holder does it once, within seconds.

A later offset SKIPS messages: they have no effect. An earlier offset REPEATS messages: those with a claim are
dropped, those whose claim was forgotten are parked, and a consumer that deduplicates by position handles all of them
again. The command prints the offsets affected. With --brokers it refuses an offset that the partition does not have.`,
		Example: `  outbox-relay consumer resume-at --group billing --topic orders --partition 3 --at latest --dry-run
  outbox-relay consumer resume-at --group billing --topic orders --partition 3 --at 4711 --why "INC-12"`,
		RunE: func(cmd *cobra.Command, _ []string) error { return r.run(cmd.Context(), cmd.OutOrStdout()) },
	}, cli.FlagDatabaseURL))
	s.Check(cmd, r.Validate)
	r.add(s, cmd, "not recorded: a dry run")
	cmd.Flags().Lookup("why").Usage = "reason; required"
	flags := cmd.Flags()
	cli.AddOption(flags, "partition", "int", "", "number of the partition; required", func(text string) error {
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil || n < 0 {
			return errors.New("want a number, from 0 on")
		}
		r.Partition.Partition = int32(n)
		return nil
	})
	cli.AddText(flags, "at", 32, "where it continues: earliest, latest or an offset", func(text string) (err error) {
		r.at, err = consumers.ParseAt(text)
		r.given = true
		return err
	})
	cli.AddBool(flags, &r.cancel, "cancel", "cancel a request that is not done yet")
	cli.AddBool(flags, &r.dryRun, "dry-run", "only show what would be skipped or repeated")
	cli.CommandLineOnly(flags, "partition", "at", "cancel", "dry-run")
	return cmd
}

// Validate returns all problems of the flags.
func (r *resumeAt) Validate() error {
	var problems []error
	if r.Partition.Partition < 0 {
		problems = append(problems, errors.New("--partition is missing"))
	}
	if r.given == r.cancel {
		problems = append(problems, errors.New("give --at (earliest, latest or an offset), or else --cancel"))
	}
	if r.cancel && r.dryRun {
		problems = append(problems, errors.New("--dry-run is for --at"))
	}
	if r.Why == "" && !r.dryRun {
		problems = append(problems, errors.New("--why is missing: say why it is done"))
	}
	return errors.Join(problems...)
}

func (r *resumeAt) run(ctx context.Context, out io.Writer) error {
	p := r.Partition
	extent, err := r.extent(ctx, p)
	if err != nil {
		return err
	}
	return r.s.OnSchema(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		if r.cancel {
			canceled, err := consumers.Cancel(ctx, pool, r.s.Schema, r.By, p)
			if err != nil {
				return err
			}
			text := "the request is canceled"
			if !canceled {
				text = "there is no request to cancel"
			}
			return say(out, r.s.JSON, map[string]any{"group": p.Group, "topic": p.Topic, "partition": p.Partition, "canceled": canceled}, "%s: %s\n", p.String(), text)
		}
		done, err := consumers.ResumeAt(ctx, pool, r.s.Schema, r.By, p, r.at, extent, r.dryRun)
		if err != nil {
			return err
		}
		return answer(out, r.s.JSON, done, resumptionText(done), true)
	})
}

// extent asks the brokers, if they are given. It is also nil for a partition that does not exist:
// the request may be for a topic that is created again.
func (r *resumeAt) extent(ctx context.Context, p consumers.Partition) (extent *topicscan.Span, err error) {
	if len(r.s.Brokers) == 0 || r.cancel {
		return nil, nil //nolint:nilnil // not known is no error
	}
	err = r.s.AskKafka(ctx, cli.ReadMax, func(ctx context.Context, client *kgo.Client) error {
		found, err := topicscan.ExtentOf(ctx, client, time.Time{}, p.Topic)
		if err != nil {
			return fmt.Errorf("%w (without --brokers the offset is not compared with the topic)", err)
		}
		if span, exists := found[p.Partition]; exists {
			extent = &span
		}
		return nil
	})
	return extent, err
}

func resumptionText(r *consumers.Resumption) string {
	verb, holder := "resumes", "the next consumer that holds it"
	if r.DryRun {
		verb = "would resume"
	}
	if r.Holder != "" {
		holder = terminal.Plain(r.Holder) + ", or the next holder,"
	}
	text := terminal.Fill("%s %s at %s: %s does it\n", r.String(), verb, consumers.AtText(r.ResumeAt), holder)
	if r.Before != nil {
		text += terminal.Fill("this replaces an earlier request: %s\n", consumers.AtText(*r.Before))
	}
	if r.Trouble != "" {
		text += terminal.Fill("the partition is halted: %s\n", terminal.Line(r.Trouble))
	}
	return text + "Warning: " + r.Effect + "\n"
}
