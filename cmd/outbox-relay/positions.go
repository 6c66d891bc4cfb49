package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/internal/consumers"
	"github.com/effectonce/effectonce/internal/inspect"
)

func newPositions(s *settings) *cobra.Command {
	var filter inspect.PositionFilter
	var asJSON bool
	cmd := needs(&cobra.Command{
		Use:   "positions",
		Short: "Show where relays stand in the outbox, and consumers in their topics",
		Long: `Show, for each shard of each relay, who holds it, its tick and how old that is, its floor, and how many
rows it has not published (of the last 100000); for each partition of each consumer group, the stored
position, the end of the topic (with --brokers), who holds it, what an operator ordered ("outbox-relay consumer"),
and why it stands still if it does. With --brokers also which topics of consumers do not exist.

Exit status 1 if there is nothing to show, or if Kafka failed: then the rest is shown, and the error.`,
		Example: `  outbox-relay positions
  outbox-relay positions --group billing --topic orders --json`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("relay") {
				filter.Relay = &s.relay
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), statusMax)
			defer cancel()
			return s.withTables(ctx, false, func(ctx context.Context, conn *pgx.Conn) error {
				kafka, err := s.openKafka(s.logger(cmd.ErrOrStderr()))
				if err != nil {
					return err
				}
				if kafka != nil {
					defer kafka.Client.Close()
				}
				positions, err := inspect.ReadPositions(ctx, conn, kafka, s.schema, filter)
				if err != nil {
					return err
				}
				if len(positions.Shards)+len(positions.Consumers)+len(positions.Paused)+len(positions.MissingTopics) == 0 {
					return errors.New("no relay and no consumer that fits has a position")
				}
				if asJSON {
					err = printJSON(cmd.OutOrStdout(), positions)
				} else {
					err = printPositions(cmd.OutOrStdout(), positions)
				}
				if err == nil && positions.KafkaError != "" {
					return errNotWell
				}
				return err
			})
		},
	}, flagDatabaseURL)
	addText(cmd.Flags(), "group", 255, "only this consumer group", into(&filter.Group))
	addText(cmd.Flags(), "topic", 249, "only this topic's positions", into(&filter.Topic))
	commandLineOnly(cmd.Flags(), "group", "topic")
	addJSON(cmd, &asJSON)
	return cmd
}

func printPositions(out io.Writer, p *inspect.Positions) error {
	var text strings.Builder
	if len(p.Shards) > 0 {
		text.WriteString("relay\tshard\tlag\ttick\ttick age\tfloor\tpublished\theld by\tlease left\tepoch\n")
	}
	for _, s := range p.Shards {
		age, owner, left := "-", "nobody", "-"
		if s.TickAgeSeconds != nil {
			age = seconds(*s.TickAgeSeconds)
		}
		if s.LeaseLeftSeconds > 0 {
			owner, left = plain(s.Owner), seconds(s.LeaseLeftSeconds)
		}
		lag := strconv.FormatInt(s.Lag, 10)
		fmt.Fprintf(&text, "%s\t%d\t%s\t%d\t%s\t%d\t%d\t%s\t%s\t%d\n", plain(s.Relay), s.Shard, lag, s.Tick, age, s.Floor, s.Published, owner, left, s.Epoch)
	}
	if err := printTable(out, text.String()); err != nil {
		return err
	}
	text.Reset()
	if len(p.Consumers) > 0 {
		text.WriteString("group\ttopic/partition\tposition\tend\tlag\tmoved\theld by\tepoch\tordered\ttrouble\n")
	}
	for _, c := range p.Consumers {
		owner := "nobody"
		if !c.Released && c.Owner != "" {
			owner = plain(c.Owner)
		}
		trouble := "-"
		if c.Trouble != "" {
			trouble = clip(c.Trouble, errorWidth)
		}
		fmt.Fprintf(&text, "%s\t%s/%d\t%s\t%s\t%s\t%s ago\t%s\t%d\t%s\t%s\n", plain(c.Group), plain(c.Topic), c.Partition,
			numberText(c.NextOffset), numberText(c.End), numberText(c.Lag), seconds(c.AgeSeconds), owner, c.Epoch, orderedText(&c), trouble)
	}
	if err := printTable(out, text.String()); err != nil {
		return err
	}
	text.Reset()
	for _, pause := range p.Paused {
		fmt.Fprintf(&text, "topic %s is paused %s\n", plain(pause.Topic), pauseText(pause))
	}
	for _, m := range p.MissingTopics {
		fmt.Fprintf(&text, "topic %s of consumer %s does not exist: is its name misspelt?\n", plain(m.Topic), consumerText(m.Consumer))
	}
	if p.KafkaError != "" {
		text.WriteString(kafkaErrorText("the ends of topics are not known", p.KafkaError))
	}
	_, err := io.WriteString(out, text.String())
	return err
}

// orderedText is what an operator ordered that still counts.
func orderedText(c *inspect.Position) string {
	var orders []string
	if c.Paused {
		orders = append(orders, "pause")
	}
	if c.ResumeAt != nil {
		orders = append(orders, "resume at "+consumers.AtText(*c.ResumeAt))
	}
	return cmp.Or(strings.Join(orders, ", "), "-")
}

func numberText(n *int64) string {
	if n == nil {
		return "-"
	}
	return strconv.FormatInt(*n, 10)
}
