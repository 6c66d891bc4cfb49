package command

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/consumers"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/inspect"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

func newPositions(s *cli.Settings) *cobra.Command {
	var filter inspect.PositionFilter
	cmd := cli.AsksKafka(cli.Needs(&cobra.Command{
		Use:   "positions",
		Short: "Show the positions of relays in the outbox, and of consumers in their topics",
		Long: `Show, per shard of a relay: holder, tick and its age, floor, and rows that wait. Show, per
partition of a group: stored position, holder, what operators requested, and why it halted. With --brokers also the ends of
topics, and topics of consumers that do not exist.

Exit status 1 if the group of --group has no positions, or if Kafka failed: then the rest is shown with the error.`,
		Example: `  outbox-relay positions
  outbox-relay positions --group billing --topic orders --json`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("relay") {
				filter.Relay = &s.Relay
			}
			var positions *inspect.Positions
			return s.Read(cmd.Context(), func(ctx context.Context, conn *pgx.Conn) error {
				err := withKafka(s, s.Logger(cmd.ErrOrStderr()), func(kafka *inspect.Kafka) (err error) {
					positions, err = inspect.ReadPositions(ctx, conn, kafka, s.Schema, filter)
					return err
				})
				if err != nil {
					return err
				}
				if none := len(positions.Shards)+len(positions.Consumers)+len(positions.Paused)+len(positions.MissingTopics) == 0; none && (filter.Group != nil || !s.JSON) {
					if filter.Group != nil {
						return fmt.Errorf("group %q has no positions: it has not run, or its name is misspelt; \"outbox-relay positions\" shows all", *filter.Group)
					}
					return terminal.Say(cmd.OutOrStdout(), "no positions: no relay and no consumer has run yet\n")
				}
				return answer(cmd.OutOrStdout(), s.JSON, positions, positionsText(positions), positions.KafkaError == "")
			})
		},
	}, cli.FlagDatabaseURL))
	cli.AddText(cmd.Flags(), "group", 255, "only this consumer group", cli.Into(&filter.Group))
	cli.AddText(cmd.Flags(), "topic", 249, "only this topic's positions", cli.Into(&filter.Topic))
	cli.CommandLineOnly(cmd.Flags(), "group", "topic")
	s.AddJSON(cmd)
	return cmd
}

func positionsText(p *inspect.Positions) string {
	var text strings.Builder
	if len(p.Shards) > 0 {
		text.WriteString("relay\tshard\twaiting\ttick\ttick age\tfloor\tpublished\theld by\tlease left\tepoch\n")
	}
	for _, s := range p.Shards {
		age, owner, left := "-", "none", "-"
		if s.TickAgeSeconds != nil {
			age = human.Seconds(*s.TickAgeSeconds)
		}
		if s.Owner != "" {
			owner, left = terminal.Plain(s.Owner), human.Seconds(s.LeaseLeftSeconds)
		}
		terminal.Add(&text, "%s\t%d\t%s\t%d\t%s\t%d\t%d\t%s\t%s\t%d\n", terminal.Plain(s.Relay), s.Shard, waitingText(s), s.Tick, age, s.Floor, s.Published, owner, left, s.Epoch)
	}
	shards := terminal.Table(text.String())
	text.Reset()
	if len(p.Consumers) > 0 {
		text.WriteString("group\ttopic/partition\tposition\tstart\tend\tlag\tmoved\theld by\tepoch\thalted\trequested\n")
	}
	for _, c := range p.Consumers {
		halted := "-"
		if c.Trouble != "" {
			halted = "yes"
		}
		terminal.Add(&text, "%s\t%s/%d\t%s\t%s\t%s\t%s\t%s ago\t%s\t%d\t%s\t%s\n", terminal.Plain(c.Group), terminal.Plain(c.Topic), c.Partition,
			numberText(c.NextOffset), numberText(c.Start), numberText(c.End), numberText(c.Lag), human.Seconds(c.AgeSeconds), holderText(&c), c.Epoch, halted, requestedText(&c))
	}
	partitions := terminal.Table(text.String())
	text.Reset()
	for i, c := range p.Consumers {
		if c.Trouble != "" {
			terminal.Add(&text, "%s/%d of group %s is halted: %s\n", terminal.Plain(c.Topic), c.Partition, terminal.Plain(c.Group), terminal.Line(c.Trouble))
		}
		if c.Members != nil && *c.Members == 0 && (i == 0 || p.Consumers[i-1].Group != c.Group) {
			terminal.Add(&text, "group %s has no members: no consumer of it runs\n", terminal.Plain(c.Group))
		}
		if c.Deleted != nil && *c.Deleted > 0 {
			terminal.Add(&text, "%s/%d: Kafka deleted %s at or after the position of group %s: the consumer applies its reset policy, or halts\n",
				terminal.Plain(c.Topic), c.Partition, human.Count(*c.Deleted, "record"), terminal.Plain(c.Group))
		}
	}
	for _, pause := range p.Paused {
		terminal.Add(&text, "topic %s is paused %s\n", terminal.Plain(pause.Topic), pauseText(pause))
	}
	for _, m := range p.MissingTopics {
		terminal.Add(&text, "topic %s of consumer %s does not exist: was it deleted, or is its name misspelt?\n", terminal.Plain(m.Topic), consumerText(m.Consumer))
	}
	if p.KafkaError != "" {
		text.WriteString(kafkaErrorText("topics and groups are incomplete", p.KafkaError))
	}
	return shards + partitions + text.String()
}

// holderText names the holder of a partition or, if the group has no members, the last holder.
func holderText(c *inspect.Position) string {
	switch {
	case c.Released || c.Owner == "":
		return "none"
	case c.Members != nil && *c.Members == 0:
		return "none (last " + terminal.Plain(c.Owner) + ")"
	}
	return terminal.Plain(c.Owner)
}

// requestedText lists what operators requested and still applies.
func requestedText(c *inspect.Position) string {
	var requested []string
	if c.Paused {
		requested = append(requested, "pause")
	}
	if c.ResumeAt != nil {
		requested = append(requested, "resume at "+consumers.AtText(*c.ResumeAt))
	}
	return cmp.Or(strings.Join(requested, ", "), "-")
}

func numberText(n *int64) string {
	if n == nil {
		return "-"
	}
	return strconv.FormatInt(*n, 10)
}
