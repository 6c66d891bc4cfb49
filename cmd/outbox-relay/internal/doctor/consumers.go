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

// statusAgeMax is how long a row may wait: the default of "status".
const statusAgeMax = time.Minute

// Pipeline reports the problems of pipeline.ReadStatus as failures, and its notes as warnings.
func Pipeline(ctx context.Context, db operator.Querier, schema string, lagAgeMax time.Duration) (found []Finding) {
	const check, remedy = "status", "as the message says; outbox-relay status shows the numbers"
	s, err := pipeline.ReadStatus(ctx, db, schema, pipeline.StatusOptions{AgeMax: statusAgeMax, LagAgeMax: lagAgeMax})
	if err != nil {
		return broken(check, err)
	}
	for _, problem := range s.Problems {
		found = append(found, fail(check, remedy, "%s", problem))
	}
	for _, note := range s.Notes {
		found = append(found, warn(check, remedy, "%s", note))
	}
	return orElse(found, ok(check, "well, with %s and %s", human.Count(len(s.Replicas), "replica"), human.Count(len(s.Consuming), "consumer")))
}
