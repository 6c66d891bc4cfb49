package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/internal/inspect"
)

func newExplain(s *settings) *cobra.Command {
	var q inspect.Question
	var timeout time.Duration
	var topic *string
	var asJSON bool
	cmd := needs(&cobra.Command{
		Use:   "explain ID",
		Short: "Show where a message or a request is: idempotency key, outbox, topic, claims, parked, children",
		Long: `Show where a message is: until when it waits if it is for later, its row in the outbox and what each relay
did with it, its records in the topic, who claimed it and when, whether it is parked, what its handlers published, what operators did about it.
ID is the ID that the message carries, the ID as logs show it, or topic/partition/offset; or the idempotency key
of a request: then what the request published is followed, under Key.ChildID of its phases, of "publish",
"publish:0" to "publish:9" or of the operation's name. The request behind such a message is found by the message's
ID, among the first 100,000 keys.

The topic is searched from the time of the row on, in the partition of its key; without a row from the
time of the ID, or --since, in the topics of all consumers or in --topic. Without --brokers it is not
searched. The outbox has no index on IDs: the table is read once.

Exit status 1 if nothing is known of it, or if Kafka failed: then the rest is shown, and the error.`,
		Example: `  outbox-relay explain 0192f0c1-2b3c-7def-8123-456789abcdef
  outbox-relay explain orders/3/1234
  outbox-relay explain order-4711 --topic orders --since 72h --json`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fmt.Errorf("%s takes one ID: see %s --help", cmd.CommandPath(), cmd.CommandPath())
			}
			if args[0] == "" || len(args[0]) > 1024 || !utf8.ValidString(args[0]) || strings.ContainsRune(args[0], 0) {
				return errors.New("ID: want 1 to 1024 bytes of UTF-8")
			}
			q.Text = args[0]
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			q.Schema = s.schema
			if topic != nil {
				q.Topics = []string{*topic}
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			return s.explain(ctx, q, asJSON, cmd.OutOrStdout(), s.logger(cmd.ErrOrStderr()))
		},
	}, flagDatabaseURL)
	flags := cmd.Flags()
	addText(flags, "topic", 249, "search this topic only", into(&topic))
	addDuration(flags, &q.Since, "since", 24*time.Hour, time.Second, 366*24*time.Hour, "how far back topics are searched for an ID without a time")
	addInt(flags, &q.ScanMax, "scan-max", 100_000, 1, 1_000_000_000, "how many records of topics are read at most")
	addDuration(flags, &timeout, "timeout", time.Minute, time.Second, time.Hour, "how long all of it may take")
	commandLineOnly(flags, "topic", "since")
	addJSON(cmd, &asJSON)
	return cmd
}

func (s *settings) explain(ctx context.Context, q inspect.Question, asJSON bool, out io.Writer, logger *slog.Logger) error {
	return s.withTables(ctx, false, func(ctx context.Context, conn *pgx.Conn) error {
		kafka, err := s.openKafka(logger)
		if err != nil {
			return err
		}
		if kafka != nil {
			defer kafka.Client.Close()
		}
		found, err := inspect.Explain(ctx, conn, kafka, q)
		if err != nil {
			return err
		}
		if asJSON {
			err = printJSON(out, found)
		} else {
			_, err = io.WriteString(out, explanationText(found))
		}
		if err == nil && (!found.Known || found.KafkaError != "") {
			return errNotWell
		}
		return err
	})
}

// openKafka returns nil without brokers.
func (s *settings) openKafka(logger *slog.Logger) (*inspect.Kafka, error) {
	if len(s.brokers) == 0 {
		return nil, nil //nolint:nilnil // not given is no error
	}
	client, err := s.askKafka(statusMax)
	if err != nil {
		return nil, err
	}
	return &inspect.Kafka{Client: client, Options: s.kafkaOptions(logger)}, nil
}

// event is a line of the timeline.
type event struct {
	at   time.Time
	what string
	text string
}

// explanationText is a timeline, and what has no time behind it.
func explanationText(x *inspect.Explanation) string {
	var text strings.Builder
	if !x.Known {
		fmt.Fprintf(&text, "nothing is known of %s\n", clip(x.Asked, errorWidth))
	}
	events := events(x)
	slices.SortStableFunc(events, func(a, b event) int { return a.at.Compare(b.at) })
	for _, e := range events {
		fmt.Fprintf(&text, "%s  %-8s  %s\n", e.at.UTC().Format("2006-01-02T15:04:05.000Z"), e.what, e.text)
	}
	switch {
	case x.KafkaError != "":
		text.WriteString(kafkaErrorText("topics were not searched, or not to their end", x.KafkaError))
	case x.Searched == nil:
		text.WriteString("topics were not searched: give --brokers, and --topic where no row and no consumer names one\n")
	case !x.Searched.Complete:
		fmt.Fprintf(&text, "topics %s: searched %d records from %s on and stopped there: --scan-max reads more\n",
			strings.Join(x.Searched.Topics, ", "), x.Searched.Records, x.Searched.Since.UTC().Format(time.RFC3339))
	case len(x.Records) == 0:
		fmt.Fprintf(&text, "not in topic %s from %s on (%d records)\n",
			strings.Join(x.Searched.Topics, ", "), x.Searched.Since.UTC().Format(time.RFC3339), x.Searched.Records)
	}
	if x.Known && len(x.Claims) == 0 && (x.KafkaError == "" || len(x.IDs) > 0) {
		text.WriteString("nobody claimed it\n")
	}
	return text.String()
}

// kafkaErrorText is one line, whatever the brokers said.
func kafkaErrorText(what, err string) string {
	return fmt.Sprintf("%s: Kafka: %s\n", what, clip(err, kafkaErrorWidth))
}

func events(x *inspect.Explanation) (all []event) {
	add := func(at time.Time, what, format string, args ...any) {
		all = append(all, event{at, what, fmt.Sprintf(format, args...)})
	}
	for _, r := range x.Requests {
		add(r.CreatedAt, "request", "%s", requestText(r))
		if r.FinishedAt != nil {
			add(*r.FinishedAt, "request", "%s is finished", clip(r.Key, errorWidth))
		}
	}
	for _, r := range x.Outbox {
		add(r.CreatedAt, "outbox", "%s", rowText(r))
	}
	for _, d := range x.Dead {
		add(d.DiedAt, "dead", "relay %s, seq %d: %s (%s): %s; attempts %d", plain(d.Relay), d.Seq, d.Reason, d.State, clip(d.Error, 200), d.Attempts)
	}
	for _, r := range x.Scheduled {
		state := ""
		if r.OverdueSeconds > 0 {
			state = ", overdue for " + seconds(r.OverdueSeconds)
		}
		add(r.CreatedAt, "later", "scheduled for %s%s: topic %s, key %s, %s", r.DueAt.UTC().Format("2006-01-02T15:04:05.000Z"), state, r.Topic, keyText(r.Key), sizeText(r.PayloadBytes))
	}
	for i, r := range x.Records {
		again := ""
		if i > 0 {
			again = ", again"
		}
		add(r.Time, "topic", "%s, key %s, message-id %s%s", r.Place, keyText(r.Key), cmp.Or(clip(r.MessageID, errorWidth), "-"), again)
	}
	for _, c := range x.Claims {
		forever := ""
		if c.Forever {
			forever = ", for ever"
		}
		add(c.ProcessedAt, "claimed", "by %s (group %s) as %s%s", consumerText(c.Consumer), plain(c.Group), c.ID, forever)
	}
	for _, a := range x.Attempts {
		add(a.UpdatedAt, "failed", "%s: %d attempts, the last: %s", consumerText(a.Consumer), a.Attempts, clip(a.Error, 200))
	}
	for i := range x.Parked {
		m := &x.Parked[i]
		add(m.ParkedAt, "parked", "by %s at %s after %d attempts: %s: %s; %s", consumerText(m.Consumer), m.At(), m.Attempts, m.Reason, clip(m.Error, 200), stateDetail(m))
	}
	for _, c := range x.Children {
		add(c.CreatedAt, "child", "id %s, %s", c.ID, rowText(c))
	}
	for _, a := range x.Actions {
		add(a.When, "operator", "%s: %s: %s", clip(a.Who, keyWidth), printable(a.What), clip(a.Why, 200))
	}
	return all
}

func rowText(r inspect.Row) string {
	text := fmt.Sprintf("topic %s, key %s, seq %d, %s", r.Topic, keyText(r.Key), r.Seq, sizeText(r.PayloadBytes))
	if len(r.States) == 0 {
		return text + "; waiting: no relay ever ran"
	}
	for _, relay := range sortedKeys(r.States) {
		text += fmt.Sprintf("; relay %s: %s", plain(relay), r.States[relay])
	}
	return text
}

func sizeText(bytes *int64) string {
	if bytes == nil {
		return "a tombstone"
	}
	return fmt.Sprintf("%d bytes", *bytes)
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
