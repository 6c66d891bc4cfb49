package doctor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/consumers"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
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
	err := operator.Each(ctx, db, "count parked messages", schema, parkedSQL, []any{pipeline.CountMax}, []any{&name, &reason, &count, &keys, &oldest}, func() error {
		c := s.consumer(name)
		c.Parked[reason] = count
		c.HeldKeys += keys
		c.OldestParkedSeconds = max(c.OldestParkedSeconds, oldest)
		return nil
	})
	for i := range s.Consuming {
		c := &s.Consuming[i]
		c.ParkedExact = sum(c.Parked) < pipeline.CountMax
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

// parkedAt is a partition with parked messages.
type parkedAt struct {
	Topic     string
	Partition int32
	Count     int64
}

// heldBack is a topic whose positions keep claims from being forgotten.
type heldBack struct {
	Group, Topic string
	Partitions   int64
	Seconds      float64 // since the oldest of them was up to date
}

// Consumers compares what the tables say about consumers with Kafka: topics with those that exist,
// dedup windows with the retention of the topics, parked messages with the partitions that exist,
// positions with the groups that still exist. ctx limits how long it waits for brokers.
func Consumers(ctx context.Context, db operator.Querier, admin *kadm.Client, schema string) []Finding {
	all, err := consumers.Registered(ctx, db, schema)
	if err != nil {
		return broken("consumers", err)
	}
	if len(all) == 0 {
		return []Finding{ok("consumers", "none is registered")}
	}
	parked, err := operator.Rows(ctx, db, "read partitions of parked messages", schema, parkedPartitionsSQL, pgx.RowToStructByPos[parkedAt], pipeline.CountMax)
	held, heldErr := operator.Rows(ctx, db, "read positions", schema, heldBackSQL, pgx.RowToStructByPos[heldBack])
	if err := errors.Join(err, heldErr); err != nil {
		return broken("consumers", err)
	}
	names := map[string]bool{}
	for _, c := range all {
		for _, topic := range c.Topics {
			names[topic] = true
		}
	}
	for _, p := range parked {
		names[p.Topic] = true
	}
	for _, h := range held {
		names[h.Topic] = true
	}
	details := kadm.TopicDetails{}
	if len(names) > 0 { // an empty list would mean all
		if details, err = admin.ListTopics(ctx, slices.Sorted(maps.Keys(names))...); err != nil {
			return broken("consumers", err)
		}
	}
	found := append(examineWindows(ctx, admin, all, details), examineNames(all, details, replicasOfNew(ctx, admin))...)
	found = append(found, examineParked(parked, details)...)
	if len(held) > 0 {
		var groups kadm.ListedGroups
		err := consumers.AskCoordinators(ctx, func() (err error) {
			groups, err = admin.ListGroups(ctx)
			return err
		})
		if err != nil {
			return append(found, broken("retention", err)...)
		}
		found = append(found, examineHeldBack(held, details, groups)...)
	}
	return found
}

// examineNames finds topics that do not exist: a consumer of one waits forever.
func examineNames(all []consumers.Consumer, details kadm.TopicDetails, replicas int) (found []Finding) {
	for _, c := range all {
		for _, topic := range c.Topics {
			if consumers.Absent(details, topic) {
				found = append(found, warn("consumer "+c.Name, "correct Topics of this consumer, or create the topic: "+createTopic(topic, replicas),
					"topic %s does not exist: was it deleted, or is its name misspelt? The consumer gets no messages from it", topic))
			}
		}
	}
	return found
}

// examineWindows checks whether Kafka may redeliver messages that a consumer no longer recognises.
func examineWindows(ctx context.Context, admin *kadm.Client, all []consumers.Consumer, details kadm.TopicDetails) []Finding {
	retention, bytes := map[string]time.Duration{}, map[string]int64{}
	var existing []string
	for name, d := range details {
		if d.Err == nil {
			existing = append(existing, name)
		}
	}
	if len(existing) > 0 {
		configs, err := admin.DescribeTopicConfigs(ctx, existing...)
		if err != nil {
			return broken("consumers", err)
		}
		for _, config := range configs {
			if kept, known := kept(config); known {
				retention[config.Name] = kept
			}
			if limit, known := setting(config, "retention.bytes"); known && limit >= 0 {
				bytes[config.Name] = limit
			}
		}
	}
	var found []Finding
	for _, c := range all {
		check := "consumer " + c.Name
		if c.Window == nil {
			found = append(found, ok(check, "it recognises duplicates forever"))
			continue
		}
		keeps := time.Duration(*c.Window * float64(time.Second))
		short := false
		for _, topic := range c.Topics {
			kept, known := retention[topic]
			if !known || kept <= keeps {
				continue
			}
			short = true
			hint := ""
			if limit, limited := bytes[topic]; limited {
				hint = fmt.Sprintf(" (at most %d bytes of a partition: retention.bytes, which does not limit the time)", limit)
			}
			found = append(found, warn(check, "set Window of this consumer to more than the retention, or Forever",
				"topic %s keeps messages %s%s, its dedup window is %v: an older message that is read again (a rewound group, a lost offset) is parked as expired", topic, keptText(kept), hint, human.Exact(keeps)))
		}
		if !short {
			found = append(found, ok(check, "its dedup window is %v, the retention of its topics is not longer", human.Exact(keeps)))
		}
	}
	return found
}

// forever is longer than any window.
const forever = 1<<63 - 1

// kept returns how long a topic keeps messages at least. One that is only compacted keeps the last
// message of each key forever.
func kept(config kadm.ResourceConfig) (d time.Duration, known bool) {
	if config.Err != nil {
		return 0, false
	}
	if text(config, "cleanup.policy") == "compact" {
		return forever, true
	}
	ms, known := setting(config, "retention.ms")
	if ms < 0 || ms > int64(forever/time.Millisecond) {
		return forever, known
	}
	return time.Duration(ms) * time.Millisecond, known
}

func keptText(d time.Duration) string {
	if d == forever {
		return "forever"
	}
	return "for " + human.Exact(d)
}

// examineParked finds parked messages that no consumer will ever receive.
func examineParked(parked []parkedAt, details kadm.TopicDetails) (found []Finding) {
	for _, p := range parked {
		d, listed := details[p.Topic]
		if listed && d.Err != nil && !errors.Is(d.Err, kerr.UnknownTopicOrPartition) {
			continue // not allowed to look
		}
		if _, exists := d.Partitions[p.Partition]; listed && d.Err == nil && exists {
			continue
		}
		found = append(found, warn("parked", "outbox-relay parked list --topic "+p.Topic+`   # create the partition, then "outbox-relay parked retry" them; else decide on each: docs/runbook.md, "Parked messages"`,
			"%s of %s/%d parked, and Kafka does not have that partition: no consumer holds it, so a retry waits forever", human.Count(p.Count, "message"), p.Topic, p.Partition))
	}
	return found
}

// ifGone points to a decision that only an operator can make: forgetting a position that is still
// needed loses messages.
const ifGone = `if it never comes back, see docs/runbook.md, "A group that is gone holds retention back"`

// examineHeldBack reports what keeps claims that are older than every window.
func examineHeldBack(held []heldBack, details kadm.TopicDetails, groups kadm.ListedGroups) (found []Finding) {
	for _, h := range held {
		age := time.Duration(h.Seconds * float64(time.Second)).Round(time.Minute)
		switch {
		case consumers.Absent(details, h.Topic):
			found = append(found, warn("retention", "create the topic again, or "+ifGone,
				"group %s has %d positions of topic %s, which does not exist; because of them claims have not been forgotten for %v", h.Group, h.Partitions, h.Topic, age))
		case !active(groups, h.Group):
			found = append(found, warn("retention", "start a consumer of the group, or "+ifGone,
				"group %s has no member, and %d of its positions of topic %s are %v behind; because of them claims are not forgotten", h.Group, h.Partitions, h.Topic, age))
		default:
			found = append(found, warn("retention", "run \"outbox-relay status\": it shows what its partitions wait for",
				"group %s is %v behind in %s of topic %s; claims are not forgotten before it has passed", h.Group, age, human.Count(h.Partitions, "partition"), h.Topic))
		}
	}
	return found
}

// active reports whether a group has members.
func active(groups kadm.ListedGroups, name string) bool {
	g, listed := groups[name]
	return listed && g.State != "Empty" && g.State != "Dead"
}
