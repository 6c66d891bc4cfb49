package pipeline

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/consumers"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// ConsumerStatus is the state of one consumer, by the name under which it claims.
type ConsumerStatus struct {
	Name  string `json:"name"`
	Group string `json:"group"`
	// Partitions counts those with a stored position.
	Partitions int64 `json:"partitions"`
	// Trouble lists the partitions that are halted.
	Trouble []PartitionTrouble `json:"trouble"`
	// Behind is how late it is; null: not later than the limit.
	Behind *Behind `json:"behind"`
	// IDRule is the rule by which its messages get their IDs.
	IDRule string `json:"id_rule"`
	// MissingTopics are those of its topics that Kafka does not have. Empty if Kafka was not asked:
	// see Status.KafkaError.
	MissingTopics []string `json:"missing_topics"`
	// Parked counts messages by reason; not exact: there are more, CountMax were counted.
	Parked      map[string]int64 `json:"parked"`
	ParkedExact bool             `json:"parked_exact"`
	// HeldKeys counts keys whose first message is parked, within the same bound.
	HeldKeys int64 `json:"held_keys"`
	// OldestParkedSeconds is the age of the oldest parked message; 0: there is none.
	OldestParkedSeconds float64 `json:"oldest_parked_seconds"`

	topics []string
}

// PartitionTrouble is why a partition is halted.
type PartitionTrouble struct {
	Topic     string `json:"topic"`
	Partition int32  `json:"partition"`
	Owner     string `json:"owner"`
	Text      string `json:"text"`
	// SaidSeconds is the time since its holder last reported the cause, which it does at every
	// attempt.
	SaidSeconds float64 `json:"said_seconds"`
}

// notes adds what operators decided, and topics that do not exist. Neither makes the status bad: an
// operator meant it, and a renamed consumer leaves its old name behind.
func (s *Status) notes(ctx context.Context, db operator.Querier, schema string) error {
	var err error
	if s.Paused, err = consumers.Pauses(ctx, db, schema, nil, nil); err != nil {
		return err
	}
	if s.Requests, err = consumers.Requests(ctx, db, schema); err != nil {
		return err
	}
	for _, c := range s.Consuming {
		for _, topic := range c.MissingTopics {
			s.Notes = append(s.Notes, fmt.Sprintf("consumer %q: topic %s does not exist: was it deleted, or is its name misspelt?", c.Name, oneLine(topic)))
		}
	}
	for _, p := range s.Paused {
		s.Notes = append(s.Notes, fmt.Sprintf("topic %s is paused for group %s since %s by %s (%s): to end the pause, run \"outbox-relay consumer resume --group %s --topic %s\"",
			oneLine(p.Topic), oneLine(p.Group), p.PausedAt.UTC().Format(time.RFC3339), oneLine(p.Who), oneLine(p.Why), human.Word(p.Group), human.Word(p.Topic)))
	}
	for _, r := range s.Requests {
		s.Notes = append(s.Notes, requestText(r))
	}
	if s.KafkaError != "" {
		s.Notes = append(s.Notes, "unknown whether the topics of consumers exist: "+oneLine(s.KafkaError))
	}
	return nil
}

func requestText(r consumers.Request) string {
	position, holder := "no position", "no consumer holds it"
	if r.Position != nil {
		position = fmt.Sprintf("position %d", *r.Position)
	}
	if r.Holder != "" {
		holder = "held by " + oneLine(r.Holder)
	}
	return fmt.Sprintf("%s: an operator requested to resume at %s, which is not done yet (%s, %s)", oneLine(r.String()), consumers.AtText(r.ResumeAt), position, holder)
}

// readMissing asks Kafka which topics exist. If no broker answers, it only records KafkaError: that
// is no fault of the consumers.
func (s *Status) readMissing(ctx context.Context, missing func(context.Context, []string) ([]string, error)) {
	if missing == nil || len(s.Consuming) == 0 {
		return
	}
	var topics []string
	for _, c := range s.Consuming {
		topics = append(topics, c.topics...)
	}
	absent, err := missing(ctx, topics)
	if err != nil {
		s.KafkaError = err.Error()
		return
	}
	for i := range s.Consuming {
		c := &s.Consuming[i]
		c.MissingTopics = slices.DeleteFunc(slices.Clone(c.topics), func(topic string) bool { return !slices.Contains(absent, topic) })
	}
}

// parked counts what waits for an operator: not what is tried again by itself, nor what is behind
// that.
func (c *ConsumerStatus) parked() (n int64) {
	for reason, count := range c.Parked {
		if reason != "retry" && reason != "behind" {
			n += count
		}
	}
	if n > 0 {
		n += c.Parked["behind"]
	}
	return n
}

// readConsumers adds every consumer.
func (s *Status) readConsumers(ctx context.Context, db operator.Querier, schema string, missing func(context.Context, []string) ([]string, error)) error {
	var err error
	s.Consuming, err = operator.Rows(ctx, db, "read consumers", schema, consumersSQL, func(row pgx.CollectableRow) (ConsumerStatus, error) {
		c := ConsumerStatus{Trouble: []PartitionTrouble{}, MissingTopics: []string{}, Parked: map[string]int64{}}
		err := row.Scan(&c.Name, &c.Group, &c.topics, &c.IDRule, &c.Partitions)
		return c, err
	})
	if err == nil {
		err = s.readTrouble(ctx, db, schema)
	}
	if err == nil {
		err = s.readParked(ctx, db, schema)
	}
	if err != nil {
		return err
	}
	s.readMissing(ctx, missing)
	return s.notes(ctx, db, schema)
}

// consumer returns the consumer of a name, or one that is dropped: it has registered since they were read.
func (s *Status) consumer(name string) *ConsumerStatus {
	for i := range s.Consuming {
		if s.Consuming[i].Name == name {
			return &s.Consuming[i]
		}
	}
	return &ConsumerStatus{Parked: map[string]int64{}}
}

func (s *Status) readTrouble(ctx context.Context, db operator.Querier, schema string) error {
	var name string
	var t PartitionTrouble
	into := []any{&name, &t.Topic, &t.Partition, &t.Owner, &t.Text, &t.SaidSeconds}
	return operator.Each(ctx, db, "read halted partitions", schema, troubleSQL, []any{troubleMax}, into, func() error {
		c := s.consumer(name)
		c.Trouble = append(c.Trouble, t)
		return nil
	})
}

func (s *Status) readParked(ctx context.Context, db operator.Querier, schema string) error {
	var name, reason string
	var count, keys int64
	var oldest float64
	err := operator.Each(ctx, db, "count parked messages", schema, parkedSQL, []any{CountMax}, []any{&name, &reason, &count, &keys, &oldest}, func() error {
		c := s.consumer(name)
		c.Parked[reason] = count
		c.HeldKeys += keys
		c.OldestParkedSeconds = max(c.OldestParkedSeconds, oldest)
		return nil
	})
	for i := range s.Consuming {
		c := &s.Consuming[i]
		c.ParkedExact = sum(c.Parked) < CountMax
	}
	return err
}

// judgeConsumers adds the problems of the consumers.
func (s *Status) judgeConsumers(parkedMax int) {
	var all int64
	for _, c := range s.Consuming {
		all += c.parked()
	}
	for _, c := range s.Consuming {
		for _, t := range c.Trouble {
			s.Problems = append(s.Problems, fmt.Sprintf("consumer %q: %s/%d halted for %s: %s",
				c.Name, oneLine(t.Topic), t.Partition, human.Seconds(t.SaidSeconds), terminal.Line(t.Text)))
		}
		if c.Behind != nil {
			s.Problems = append(s.Problems, fmt.Sprintf("consumer %q: %s: %s", c.Name, c.Behind.text(), c.Behind.remedy(c.Group)))
		}
		if n := c.parked(); n > 0 && all > int64(parkedMax) {
			s.Problems = append(s.Problems, fmt.Sprintf("consumer %q: %s%s parked, %s%s held, the oldest for %s: see \"outbox-relay parked list\"",
				c.Name, atLeast(c.ParkedExact), human.Count(n, "message"), atLeast(c.ParkedExact), human.Count(c.HeldKeys, "key"), human.Seconds(c.OldestParkedSeconds)))
		}
	}
}

// oneLine turns the text of a foreign error into one line that a terminal can show.
func oneLine(text string) string { return terminal.Clip(text, 300) }

// ReasonsText formats counts by reason, in a fixed order. Not exact: there are more.
func ReasonsText(counts map[string]int64, exact bool) string {
	total := sum(counts)
	if total == 0 {
		return "0"
	}
	var reasons []string
	for _, reason := range slices.Sorted(maps.Keys(counts)) {
		reasons = append(reasons, fmt.Sprintf("%s %d", reason, counts[reason]))
	}
	return fmt.Sprintf("%s%d (%s)", atLeast(exact), total, strings.Join(reasons, ", "))
}

func atLeast(exact bool) string {
	if exact {
		return ""
	}
	return "at least "
}

func sum(counts map[string]int64) (total int64) {
	for _, n := range counts {
		total += n
	}
	return total
}

// LagAgeMaxDefault is how old a position may be. For most consumers a message later than this is
// late; a consumer at the end of its partition stores that once a minute.
const LagAgeMaxDefault = 5 * time.Minute

// Behind is how late a consumer is. A position is as old as the last record before it, or as the
// last time when it was seen at the end of its partition. So the position of a consumer that no
// longer runs also gets older.
type Behind struct {
	Partitions int64 `json:"partitions"` // partitions that are older than the limit
	Unheld     int64 `json:"unheld"`     // how many of them no process holds
	// The oldest of them, and its holder. Owner is empty if no process holds it.
	Topic      string  `json:"topic"`
	Partition  int32   `json:"partition"`
	Owner      string  `json:"owner"`
	AgeSeconds float64 `json:"age_seconds"`
	// OpenTransaction describes a transaction that holds its records back; empty: there is none, or
	// Kafka was not asked.
	OpenTransaction string `json:"open_transaction"`
}

// text is what is wrong; remedy is what to do.
func (b *Behind) text() string {
	text := fmt.Sprintf("%s behind, the oldest, %s/%d, for %s", human.Count(b.Partitions, "partition"), oneLine(b.Topic), b.Partition, human.Seconds(b.AgeSeconds))
	switch {
	case b.Unheld == b.Partitions:
		return text + ", held by no process"
	case b.Unheld > 0:
		return text + fmt.Sprintf("; %d of them not held by any process", b.Unheld)
	}
	return text + ", held by " + oneLine(b.Owner)
}

func (b *Behind) remedy(group string) string {
	if b.Unheld > 0 {
		return fmt.Sprintf("start a consumer of group %s, or find out why it does not get its partitions: \"outbox-relay positions --group %s\"", oneLine(group), human.Word(group))
	}
	if b.OpenTransaction != "" {
		return b.OpenTransaction
	}
	return fmt.Sprintf("the consumer is slow, hangs or died, or a transaction of another program is open on the topic (--brokers): see its log, and the members and the lag of the group in \"outbox-relay positions --group %s\"", human.Word(group))
}

// readBehind adds the consumers that are later than the limit; 0: no limit.
func (s *Status) readBehind(ctx context.Context, db operator.Querier, schema string, limit time.Duration, open func(ctx context.Context, topic string, partition int32) error) error {
	if limit == 0 {
		return nil
	}
	var name string
	var b Behind
	into := []any{&name, &b.Topic, &b.Partition, &b.Owner, &b.AgeSeconds, &b.Partitions, &b.Unheld}
	return operator.Each(ctx, db, "read how late consumers are", schema, behindSQL, []any{limit.Seconds()}, into, func() error {
		found := b
		if open != nil && b.Unheld == 0 {
			if err := open(ctx, b.Topic, b.Partition); err != nil {
				found.OpenTransaction = err.Error()
			}
		}
		s.consumer(name).Behind = &found
		return nil
	})
}
