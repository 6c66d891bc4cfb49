package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/consumers"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/trace"
	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pause"
)

type statusOptions struct {
	pipeline.StatusOptions

	interval time.Duration
	watch    time.Duration // 0: once
}

func newStatus(s *cli.Settings) *cobra.Command {
	var opts statusOptions
	cmd := cli.AsksKafka(cli.Needs(&cobra.Command{
		Use:   "status",
		Short: "Show backlog, publishing rate, replicas and consumers",
		Long: `Show backlog, publishing rate and replicas of relays; per consumer, halted partitions and why, parked messages and
paused topics. With --brokers also topics of consumers that do not exist. With --relay only that relay, and all
consumers.

Exit status 1 if rows wait and no replica holds the lease or reaches Kafka; a replica is stuck; a row waits for longer
than --age-max, or a scheduled message is overdue for longer; rows are in outbox_dead; a sequence went back (see
"outbox-relay repair"); a partition halted; a consumer is later than --lag-age-max, or gone for longer; or more than
--parked-max messages are parked.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("relay") {
				opts.Relay = s.Relay
			}
			if opts.watch > 0 {
				return watchStatus(cmd.Context(), s, opts, cmd.OutOrStdout())
			}
			return showStatus(cmd.Context(), s, opts, cmd.OutOrStdout())
		},
	}, cli.FlagDatabaseURL))
	cli.AddDuration(cmd.Flags(), &opts.interval, "interval", time.Second/2, 0, time.Minute, "how long to measure the rate; 0s: do not measure")
	cli.AddDuration(cmd.Flags(), &opts.AgeMax, "age-max", time.Minute, time.Millisecond, 24*time.Hour, "how long a row may wait")
	addLagAgeMax(cmd.Flags(), &opts.LagAgeMax)
	cli.AddDuration(cmd.Flags(), &opts.watch, "watch", 0, 0, time.Hour, "repeat at this interval until interrupted; 0s: once")
	cli.CommandLineOnly(cmd.Flags(), "watch")
	cli.AddInt(cmd.Flags(), &opts.ParkedMax, "parked-max", 0, 0, pipeline.CountMax, "how many messages may be parked")
	s.AddJSON(cmd)
	return cmd
}

// addLagAgeMax adds the flag of commands that judge consumers.
func addLagAgeMax(flags *pflag.FlagSet, target *time.Duration) {
	cli.AddDuration(flags, target, "lag-age-max", pipeline.LagAgeMaxDefault, 0, 30*24*time.Hour, "how late a consumer may be: the age of its oldest position; 0s: any")
}

func showStatus(ctx context.Context, s *cli.Settings, opts statusOptions, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, cli.ReadMax+opts.interval)
	defer cancel()
	return s.WithTables(ctx, false, func(ctx context.Context, conn *pgx.Conn) error {
		status, err := readStatus(ctx, s, conn, opts)
		if err != nil {
			return err
		}
		return answer(out, s.JSON, status, statusText(status), status.Well)
	})
}

func readStatus(ctx context.Context, s *cli.Settings, conn *pgx.Conn, opts statusOptions) (*pipeline.Status, error) {
	if len(s.Brokers) > 0 {
		opts.Missing = func(ctx context.Context, topics []string) ([]string, error) { return missingTopics(ctx, s, topics) }
		opts.Open = func(ctx context.Context, topic string, partition int32) (open error) {
			_ = s.AskKafka(ctx, missingMax, func(ctx context.Context, client *kgo.Client) error { // an error: it is unknown
				admin := kadm.NewClient(client)
				ends, err := admin.ListEndOffsets(ctx, topic)
				if end, known := ends.Lookup(topic, partition); known {
					open = topicscan.Open(ctx, admin, topic, map[int32]int64{partition: end.Offset})
				}
				return err
			})
			return open
		}
	}
	begun := time.Now()
	status, err := pipeline.ReadStatus(ctx, conn, s.Schema, opts.StatusOptions)
	if err != nil || opts.interval == 0 {
		return status, err
	}
	if !pause.For(ctx, opts.interval-time.Since(begun)) {
		return nil, ctx.Err()
	}
	now, err := pipeline.Shards(ctx, conn, s.Schema, nil)
	if err == nil {
		status.MeasureRates(now)
	}
	return status, err
}

// missingMax is the time limit of the brokers' answer. It is short, because the status comes from
// the database and must not wait for brokers.
const missingMax = 2 * time.Second

func missingTopics(ctx context.Context, s *cli.Settings, topics []string) (absent []string, err error) {
	err = s.AskKafka(ctx, missingMax, func(ctx context.Context, client *kgo.Client) (err error) {
		absent, err = consumers.Missing(ctx, kadm.NewClient(client), topics)
		return err
	})
	return absent, err
}

func statusText(status *pipeline.Status) string {
	var text strings.Builder
	text.WriteString(relaysText(status.Relays))
	if status.Scheduled.Count > 0 {
		text.WriteString(scheduledText(status.Scheduled))
	}
	terminal.Add(&text, "consumers: %d, with %d partition positions\n", status.Consumers, status.Positions)
	text.WriteString(consumersText(status.Consuming))
	if d := status.Dedup; d != nil {
		text.WriteString(claimsText(d))
	}
	for _, note := range status.Notes {
		terminal.Add(&text, "note: %s\n", note)
	}
	for _, problem := range status.Problems {
		terminal.Add(&text, "not well: %s\n", problem)
	}
	if status.Well {
		terminal.Add(&text, "well\n")
	}
	return text.String()
}

func scheduledText(s pipeline.Scheduled) string {
	some := func(n int64, exact bool) string {
		if exact {
			return strconv.FormatInt(n, 10)
		}
		return "more than " + strconv.FormatInt(n, 10)
	}
	text := "scheduled for later: " + some(s.Count, s.CountExact)
	if s.Overdue > 0 {
		text += fmt.Sprintf(", %s of them overdue, the oldest for %s", some(s.Overdue, s.OverdueExact), human.Seconds(s.OldestOverdueSeconds))
	}
	return text + "\n"
}

// claimsText is the size of the claims, in up to two lines.
func claimsText(d *dedup.Stats) string {
	maintained := "never maintained"
	if d.MaintainedSeconds != nil {
		maintained = "maintained " + human.Seconds(*d.MaintainedSeconds) + " ago"
	}
	each := ""
	if d.BytesPerClaim > 0 {
		each = fmt.Sprintf(", %.0f bytes each", d.BytesPerClaim)
	}
	text := terminal.Fill("claims: about %d in %s%s, of these %d without time; forever %d in %s; days %s to %s, %s\n",
		d.Claims, bytesText(d.Bytes), each, d.Untimed, d.Forever, bytesText(d.ForeverBytes),
		d.OldestDay.Format(time.DateOnly), d.LastDay.Format(time.DateOnly), maintained)
	if d.HeldBack != "" {
		text += terminal.Fill("claims are kept beyond every window for the position of %s\n", terminal.Plain(d.HeldBack))
	}
	return text
}

func bytesText(n int64) string {
	if n < 1<<30 {
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
}

func relaysText(all []pipeline.RelayStatus) string {
	return table(all, "relay\tshard\twaiting\toldest\trows/s\tpublished\tdead\theld by\tlease left\tepoch", func(r pipeline.RelayStatus) string {
		waiting, oldest, rate, owner, left := waitingText(r.Progress), "-", "-", "none", "-"
		if r.OldestWaitingSeconds > 0 {
			oldest = human.Seconds(r.OldestWaitingSeconds)
		}
		if r.RowsPerSecond != nil {
			rate = fmt.Sprintf("%.0f", *r.RowsPerSecond)
		}
		if r.Owner != "" {
			owner, left = terminal.Plain(r.Owner), human.Seconds(r.LeaseLeftSeconds)
		}
		return terminal.Fill("%s\t%d\t%s\t%s\t%s\t%d\t%s\t%s\t%s\t%d", terminal.Plain(r.Relay), r.Shard, waiting, oldest, rate, r.Published,
			pipeline.ReasonsText(r.Dead, r.DeadExact), owner, left, r.Epoch)
	})
}

func waitingText(s pipeline.Progress) string {
	text := strconv.FormatInt(s.Waiting, 10)
	if !s.WaitingExact {
		text = "about " + text
	}
	return text
}

func consumersText(all []pipeline.ConsumerStatus) string {
	return table(all, "consumer\tpartitions\thalted\tbehind\tparked\tkeys held\toldest parked", func(c pipeline.ConsumerStatus) string {
		oldest := "-"
		if c.OldestParkedSeconds > 0 {
			oldest = human.Seconds(c.OldestParkedSeconds)
		}
		behind := "-"
		if c.Behind != nil {
			behind = human.Seconds(c.Behind.AgeSeconds)
		}
		return terminal.Fill("%s\t%d\t%d\t%s\t%s\t%d\t%s", consumerText(c.Name), c.Partitions, len(c.Trouble), behind,
			pipeline.ReasonsText(c.Parked, c.ParkedExact), c.HeldKeys, oldest)
	})
}

// watchStatus repeats the status until ctx ends, and then returns nil.
func watchStatus(ctx context.Context, s *cli.Settings, opts statusOptions, out io.Writer) error {
	again := time.NewTicker(opts.watch)
	defer again.Stop()
	for {
		terminal.NewScreen(out).Clear()
		if err := showStatus(ctx, s, opts, out); err != nil && !errors.Is(err, errUnhealthy) {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return nil
		}
	}
}

func newPositions(s *cli.Settings) *cobra.Command {
	var filter trace.PositionFilter
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
			var positions *trace.Positions
			return s.Read(cmd.Context(), func(ctx context.Context, conn *pgx.Conn) error {
				err := withKafka(s, s.Logger(cmd.ErrOrStderr()), func(kafka *trace.Kafka) (err error) {
					positions, err = trace.ReadPositions(ctx, conn, kafka, s.Schema, filter)
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

func positionsText(p *trace.Positions) string {
	shards := table(p.Shards, "relay\tshard\twaiting\ttick\ttick age\tfloor\tpublished\theld by\tlease left\tepoch", func(s pipeline.Progress) string {
		age, owner, left := "-", "none", "-"
		if s.TickAgeSeconds != nil {
			age = human.Seconds(*s.TickAgeSeconds)
		}
		if s.Owner != "" {
			owner, left = terminal.Plain(s.Owner), human.Seconds(s.LeaseLeftSeconds)
		}
		return terminal.Fill("%s\t%d\t%s\t%d\t%s\t%d\t%d\t%s\t%s\t%d",
			terminal.Plain(s.Relay), s.Shard, waitingText(s), s.Tick, age, s.Floor, s.Published, owner, left, s.Epoch)
	})
	const columns = "group\ttopic/partition\tposition\tstart\tend\tlag\tmoved\theld by\tepoch\thalted\trequested"
	partitions := table(p.Consumers, columns, func(c trace.Position) string {
		halted := "-"
		if c.Trouble != "" {
			halted = "yes"
		}
		return terminal.Fill("%s\t%s/%d\t%s\t%s\t%s\t%s\t%s ago\t%s\t%d\t%s\t%s", terminal.Plain(c.Group), terminal.Plain(c.Topic), c.Partition,
			numberText(c.NextOffset), numberText(c.Start), numberText(c.End), numberText(c.Lag), human.Seconds(c.AgeSeconds), holderText(&c), c.Epoch, halted, requestedText(&c))
	})
	var text strings.Builder
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
	for _, paused := range p.Paused {
		terminal.Add(&text, "topic %s is paused %s\n", terminal.Plain(paused.Topic), pauseText(paused))
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
func holderText(c *trace.Position) string {
	switch {
	case c.Released || c.Owner == "":
		return "none"
	case c.Members != nil && *c.Members == 0:
		return "none (last " + terminal.Plain(c.Owner) + ")"
	}
	return terminal.Plain(c.Owner)
}

// requestedText lists what operators requested and still applies.
func requestedText(c *trace.Position) string {
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
