package doctor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/consumers"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
)

// window is how long a consumer recognises redelivered messages.
type window struct {
	name   string
	topics []string
	keeps  *float64 // seconds; nil: forever
}

// parkedAt is a partition with parked messages.
type parkedAt struct {
	topic     string
	partition int32
	count     int64
}

// heldBack is a topic whose positions keep claims from being forgotten.
type heldBack struct {
	group, topic string
	partitions   int64
	seconds      float64 // since the oldest of them was up to date
}

// Consumers compares what the tables say about consumers with Kafka: topics with those that exist,
// dedup windows with the retention of the topics, parked messages with the partitions that exist,
// positions with the groups that still exist. ctx limits how long it waits for brokers.
func Consumers(ctx context.Context, db operator.Querier, admin *kadm.Client, schema string) []Finding {
	windows, err := readWindows(ctx, db, schema)
	if err != nil {
		return broken("consumers", err)
	}
	if len(windows) == 0 {
		return []Finding{ok("consumers", "none is registered")}
	}
	parked, held, err := readLeftOvers(ctx, db, schema)
	if err != nil {
		return broken("consumers", err)
	}
	names := map[string]bool{}
	for _, w := range windows {
		for _, topic := range w.topics {
			names[topic] = true
		}
	}
	for _, p := range parked {
		names[p.topic] = true
	}
	for _, h := range held {
		names[h.topic] = true
	}
	details := kadm.TopicDetails{}
	if len(names) > 0 { // an empty list would mean all
		if details, err = admin.ListTopics(ctx, slices.Sorted(maps.Keys(names))...); err != nil {
			return broken("consumers", err)
		}
	}
	found := append(examineWindows(ctx, admin, windows, details), examineNames(windows, details, replicasOfNew(ctx, admin))...)
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

func readWindows(ctx context.Context, db operator.Querier, schema string) ([]window, error) {
	rows, err := db.Query(ctx, inSchema(windowsSQL, schema))
	if err != nil {
		return nil, fmt.Errorf("read consumers: %w", err)
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (w window, err error) {
		return w, row.Scan(&w.name, &w.topics, &w.keeps)
	})
	if err != nil {
		return nil, fmt.Errorf("read consumers: %w", err)
	}
	return all, nil
}

func readLeftOvers(ctx context.Context, db operator.Querier, schema string) ([]parkedAt, []heldBack, error) {
	rows, err := db.Query(ctx, inSchema(parkedPartitionsSQL, schema), pipeline.CountMax)
	if err != nil {
		return nil, nil, fmt.Errorf("read partitions of parked messages: %w", err)
	}
	parked, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (p parkedAt, err error) {
		return p, row.Scan(&p.topic, &p.partition, &p.count)
	})
	if err != nil {
		return nil, nil, fmt.Errorf("read partitions of parked messages: %w", err)
	}
	rows, err = db.Query(ctx, inSchema(heldBackSQL, schema))
	if err != nil {
		return nil, nil, fmt.Errorf("read positions: %w", err)
	}
	held, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (h heldBack, err error) {
		return h, row.Scan(&h.group, &h.topic, &h.partitions, &h.seconds)
	})
	if err != nil {
		return nil, nil, fmt.Errorf("read positions: %w", err)
	}
	return parked, held, nil
}

// examineNames finds topics that do not exist: a consumer of one waits forever.
func examineNames(windows []window, details kadm.TopicDetails, replicas int) (found []Finding) {
	for _, w := range windows {
		for _, topic := range w.topics {
			if consumers.Absent(details, topic) {
				found = append(found, warn("consumer "+w.name, "correct Topics of this consumer, or create the topic: "+createTopic(topic, replicas),
					"topic %s does not exist: is its name misspelt? The consumer gets no messages from it", topic))
			}
		}
	}
	return found
}

// examineWindows checks whether Kafka may redeliver messages that a consumer no longer recognises.
func examineWindows(ctx context.Context, admin *kadm.Client, windows []window, details kadm.TopicDetails) []Finding {
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
	for _, w := range windows {
		check := "consumer " + w.name
		if w.keeps == nil {
			found = append(found, ok(check, "it recognises duplicates forever"))
			continue
		}
		keeps := time.Duration(*w.keeps * float64(time.Second))
		short := false
		for _, topic := range w.topics {
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
	if onlyCompacted(config) {
		return forever, true
	}
	ms, known := setting(config, "retention.ms")
	if ms < 0 || ms > int64(forever/time.Millisecond) {
		return forever, known
	}
	return time.Duration(ms) * time.Millisecond, known
}

func onlyCompacted(config kadm.ResourceConfig) bool {
	return slices.ContainsFunc(config.Configs, func(entry kadm.Config) bool {
		return entry.Key == "cleanup.policy" && entry.Value != nil && *entry.Value == "compact"
	})
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
		d, listed := details[p.topic]
		if listed && d.Err != nil && !errors.Is(d.Err, kerr.UnknownTopicOrPartition) {
			continue // not allowed to look
		}
		if _, exists := d.Partitions[p.partition]; listed && d.Err == nil && exists {
			continue
		}
		found = append(found, warn("parked", "outbox-relay parked list --topic "+p.topic+`   # create the partition, then run parked retry; else decide on each: docs/runbook.md, "Parked messages"`,
			"%s of %s/%d parked, and Kafka does not have that partition: no consumer holds it, so a retry waits forever", human.Count(p.count, "message"), p.topic, p.partition))
	}
	return found
}

// ifGone points to a decision that only an operator can make: forgetting a position that is still
// needed loses messages.
const ifGone = `if it never comes back, see docs/runbook.md, "A group that is gone holds retention back"`

// examineHeldBack reports what keeps claims that are older than every window.
func examineHeldBack(held []heldBack, details kadm.TopicDetails, groups kadm.ListedGroups) (found []Finding) {
	for _, h := range held {
		age := time.Duration(h.seconds * float64(time.Second)).Round(time.Minute)
		switch d, listed := details[h.topic]; {
		case !listed || errors.Is(d.Err, kerr.UnknownTopicOrPartition):
			found = append(found, warn("retention", "create the topic again, or "+ifGone,
				"group %s has %d positions of topic %s, which does not exist; because of them claims have not been forgotten for %v", h.group, h.partitions, h.topic, age))
		case !active(groups, h.group):
			found = append(found, warn("retention", "start a consumer of the group, or "+ifGone,
				"group %s has no member, and %d of its positions of topic %s are %v behind; because of them claims are not forgotten", h.group, h.partitions, h.topic, age))
		default:
			found = append(found, warn("retention", "run \"outbox-relay status\": it shows what its partitions wait for",
				"group %s is %v behind in %s of topic %s; claims are not forgotten before it has passed", h.group, age, human.Count(h.partitions, "partition"), h.topic))
		}
	}
	return found
}

// active reports whether a group has members.
func active(groups kadm.ListedGroups, name string) bool {
	g, listed := groups[name]
	return listed && g.State != "Empty" && g.State != "Dead"
}
