package command

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/held"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/trace"
)

func newExplain(s *cli.Settings) *cobra.Command {
	var q trace.Question
	var timeout time.Duration
	var topic *string
	cmd := cli.AsksKafka(cli.Needs(&cobra.Command{
		Use:   "explain ID",
		Short: "Show where a message or a request is: idempotency key, outbox, topic, claims, parked, children",
		Long: `Show the history of a message: schedule, outbox row and what each relay did with it, records in topics, claims, failed
parking, messages of its handlers, operators' actions.

ID is a message ID (as the message carries it, or as in logs), topic/partition/offset, or a request's idempotency key. A
request's messages are found under Key.ChildID of its phases.

Topics are only searched with --brokers: the row's topic from its time on, in the partition of its key; without a row
from the ID's time, or --since, the topics of all consumers or --topic. The whole outbox is read at least once.

Exit status 1 if nothing is known of the ID, or if Kafka failed or a table could not be read: then the rest is shown
with the error.`,
		Example: `  outbox-relay explain 0192f0c1-2b3c-7def-8123-456789abcdef
  outbox-relay explain orders/3/1234
  outbox-relay explain order-4711 --topic orders --since 72h --json`,
		Args: cli.OneID(func(id string) error { q.Text = id; return nil }),
		RunE: func(cmd *cobra.Command, _ []string) error {
			q.Schema = s.Schema
			if topic != nil {
				q.Topics = []string{*topic}
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			return s.WithTables(ctx, false, func(ctx context.Context, conn *pgx.Conn) error {
				return withKafka(s, s.Logger(cmd.ErrOrStderr()), func(kafka *trace.Kafka) error {
					found, err := trace.Explain(ctx, conn, kafka, q)
					if err != nil {
						return err
					}
					well := found.Known && found.KafkaError == "" && len(found.Problems) == 0
					return answer(cmd.OutOrStdout(), s.JSON, found, explanationText(found, kafka != nil), well)
				})
			})
		},
	}, cli.FlagDatabaseURL))
	flags := cmd.Flags()
	cli.AddText(flags, "topic", 249, "search this topic only", cli.Into(&topic))
	cli.AddDuration(flags, &q.Since, "since", 24*time.Hour, time.Second, 366*24*time.Hour, "how far back to search topics for an ID without a time")
	cli.AddInt(flags, &q.ScanMax, "scan-max", 100_000, 1, 1_000_000_000, "read at most this many records of topics")
	cli.AddDuration(flags, &timeout, "timeout", time.Minute, time.Second, time.Hour, "time limit of the command")
	cli.CommandLineOnly(flags, "topic", "since")
	s.AddJSON(cmd)
	return cmd
}

// withKafka runs work with what reads topics: nil without brokers.
func withKafka(s *cli.Settings, logger *slog.Logger, work func(*trace.Kafka) error) error {
	if len(s.Brokers) == 0 {
		return work(nil)
	}
	client, err := s.KafkaClient(cli.ReadMax)
	if err != nil {
		return err
	}
	defer client.Close()
	return work(&trace.Kafka{Client: client, Options: s.KafkaOptions(logger)})
}

// event is a line of the timeline.
type event struct {
	at   time.Time
	what string
	text string
}

// explanationText is a timeline, followed by the facts that have no time.
func explanationText(x *trace.Explanation, kafkaGiven bool) string {
	var text strings.Builder
	if !x.Known {
		terminal.Add(&text, "nothing is known of %s\n", terminal.Clip(x.Asked, errorWidth))
	}
	events := events(x)
	slices.SortStableFunc(events, func(a, b event) int { return a.at.Compare(b.at) })
	for _, e := range events {
		terminal.Add(&text, "%s  %-8s  %s\n", e.at.UTC().Format("2006-01-02T15:04:05.000Z"), e.what, e.text)
	}
	if x.At != nil && x.At.Text != "" {
		terminal.Add(&text, "%s: %s\n", x.At.Place, x.At.Text)
	}
	switch {
	case x.At != nil && len(x.Records) == 0 && x.KafkaError == "": // the place itself says why
	case x.KafkaError != "":
		text.WriteString(kafkaErrorText("topics were not searched, or not to their end", x.KafkaError))
	case x.Searched == nil && kafkaGiven:
		text.WriteString("topics were not searched: no row and no consumer names one: give --topic\n")
	case x.Searched == nil:
		text.WriteString("topics were not searched: give --brokers, and --topic where no row and no consumer names one\n")
	case !x.Searched.Complete:
		terminal.Add(&text, "topics %s: searched %s from %s on and stopped there: --scan-max reads more\n",
			strings.Join(x.Searched.Topics, ", "), human.Count(x.Searched.Records, "record"), x.Searched.Since.UTC().Format(time.RFC3339))
	case len(x.Records) == 0 && len(x.Searched.Missing) < len(x.Searched.Topics):
		terminal.Add(&text, "not in topic %s from %s on (%s searched)\n",
			strings.Join(x.Searched.Topics, ", "), x.Searched.Since.UTC().Format(time.RFC3339), human.Count(x.Searched.Records, "record"))
	}
	if x.Searched != nil && x.At == nil {
		for _, topic := range x.Searched.Missing {
			terminal.Add(&text, "topic %s does not exist: was it deleted, or is its name misspelt?\n", terminal.Plain(topic))
		}
	}
	for _, p := range x.Passed {
		terminal.Add(&text, "handled by %s: the position of group %s in %s/%d is %d; %s\n", consumerText(p.Consumer), terminal.Plain(p.Group), p.Topic, p.Partition, p.Position, claimGone(p.WindowSeconds))
	}
	if x.Known && len(x.Claims)+len(x.Passed) == 0 && (x.KafkaError == "" || len(x.IDs) > 0) {
		text.WriteString("not claimed\n")
	}
	for _, problem := range x.Problems {
		terminal.Add(&text, "incomplete: %s\n", terminal.Clip(problem, kafkaErrorWidth))
	}
	return text.String()
}

// claimGone says why a consumer that handled a message has no claim of it.
func claimGone(window *float64) string {
	if window == nil {
		return "it has no claim: it may deduplicate by position"
	}
	return "it has no claim: claims are kept for " + human.Seconds(*window) + ", or it deduplicates by position"
}

// kafkaErrorText is one line, even if the error has several.
func kafkaErrorText(what, err string) string {
	return terminal.Fill("%s: Kafka: %s\n", what, terminal.Clip(err, kafkaErrorWidth))
}

func events(x *trace.Explanation) (all []event) {
	add := func(at time.Time, what, format string, args ...any) {
		all = append(all, event{at, what, fmt.Sprintf(format, args...)})
	}
	for _, r := range x.Requests {
		add(r.CreatedAt, "request", "%s", requestText(r))
		if r.FinishedAt != nil {
			add(*r.FinishedAt, "request", "%s is finished", terminal.Clip(r.Key, errorWidth))
		}
	}
	for _, r := range x.Outbox {
		add(r.CreatedAt, "outbox", "%s", rowText(r))
	}
	for i := range x.Dead {
		add(x.Dead[i].HeldAt, "dead", "%s", heldText(&x.Dead[i]))
	}
	for _, r := range x.Scheduled {
		state := ""
		if r.OverdueSeconds > 0 {
			state = ", overdue for " + human.Seconds(r.OverdueSeconds)
		}
		if r.Refused != nil {
			state += ", refused by the outbox: " + terminal.Clip(*r.Refused, errorWidth)
		}
		add(r.CreatedAt, "later", "scheduled for %s%s: topic %s, key %s, %s", r.DueAt.UTC().Format("2006-01-02T15:04:05.000Z"), state, r.Topic, keyText(r.Key), sizeText(r.PayloadBytes))
	}
	for i, r := range x.Records {
		again := ""
		if slices.ContainsFunc(x.Records[:i], func(b trace.Record) bool { return b.Topic == r.Topic }) {
			again = ", again" // in another topic it is a copy that a rule made
		}
		add(r.Time, "topic", "%s, key %s, message-id %s%s", r.Place, keyText(r.Key), cmp.Or(terminal.Clip(r.MessageID, errorWidth), "-"), again)
	}
	for _, c := range x.Claims {
		forever := ""
		if c.Forever {
			forever = ", forever"
		}
		add(c.ProcessedAt, "claimed", "by %s (group %s) as %s%s", consumerText(c.Consumer), terminal.Plain(c.Group), c.ID, forever)
	}
	for i := range x.Parked {
		add(x.Parked[i].HeldAt, "parked", "%s", heldText(&x.Parked[i]))
	}
	for _, c := range x.Children {
		add(c.CreatedAt, "child", "id %s, %s", c.ID, rowText(c))
	}
	for _, a := range x.Actions {
		add(a.When, "operator", "%s: %s: %s", terminal.Clip(a.By(), keyWidth), whatText(&a), terminal.Clip(a.Why, 200))
	}
	return all
}

// heldText is a row that waits, in a timeline.
func heldText(r *held.Row) string {
	text := "by " + consumerText(r.Consumer) + " at " + r.At()
	if r.Partition == nil {
		text = "by relay " + terminal.Plain(r.Relay) + ", " + r.At()
	}
	text += ", after " + human.Count(r.Attempts, "attempt") + ": "
	if r.Head == nil {
		text += r.Reason + ": "
		if failure := terminal.Clip(r.Error, 200); failure != "" {
			text += failure + ": "
		}
	}
	return text + stateDetail(r)
}

func rowText(r trace.Row) string {
	text := fmt.Sprintf("topic %s, key %s, seq %d, %s", r.Topic, keyText(r.Key), r.Seq, sizeText(r.PayloadBytes))
	if len(r.States) == 0 {
		return text + "; waiting: no relay has run yet"
	}
	for _, relay := range sortedKeys(r.States) {
		text += fmt.Sprintf("; relay %s: %s", terminal.Plain(relay), r.States[relay])
	}
	return text
}

func sizeText(bytes *int64) string {
	if bytes == nil {
		return "a tombstone"
	}
	return human.Count(*bytes, "byte")
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
