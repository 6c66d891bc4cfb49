package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/fleet"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/judge"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/ledger"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/worker"
	"github.com/effectonce/effectonce/internal/pause"
)

func fakeKafka(_ scene.Scene, on Abilities) bool { return on.Fake }

func severalBrokers(_ scene.Scene, on Abilities) bool { return on.Brokers > 1 }

// noPromotion: positions do not go back behind records that are deleted.
func noPromotion(_ scene.Scene, on Abilities) bool { return !on.Promote }

// kafkaKinds are the faults of Kafka, and what its operators do.
func kafkaKinds() []kind {
	second := time.Second
	return []kind{
		{"move-leader", 6, 0, 0, severalBrokers},
		{"move-coordinator", 4, 0, 0, severalBrokers},
		{"kafka-errors", 8, second / 2, 5 * second, fakeKafka},
		{"rewind-offsets", 4, 0, 0, byID},
		{"delete-records", 5, 0, 0, noPromotion},
		{"add-partitions", 1, 0, 0, always},
	}
}

func isOfKafka(f Fault) bool {
	return slices.ContainsFunc(kafkaKinds(), func(k kind) bool { return k.name == f.Kind })
}

// ofKafka carries out one of kafkaKinds.
func (n *nemesis) ofKafka(ctx context.Context, f Fault, random *rand.Rand) (string, error) {
	limited, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	switch f.Kind {
	case "move-leader":
		return n.moveLeaders(limited, n.drawTopic(random), random)
	case "move-coordinator":
		return n.moveCoordinators(limited, random)
	case "kafka-errors":
		return n.kafkaErrors(ctx, f.For, random)
	case "rewind-offsets":
		return n.rewind(limited, random)
	case "delete-records":
		return n.deleteRecords(limited, random)
	default:
		return n.addPartitions(limited, random)
	}
}

// drawTopic draws the topic of orders, or one of children.
func (n *nemesis) drawTopic(random *rand.Rand) string {
	topics := []string{n.name, n.name}
	for _, g := range n.plan.Scene.Groups {
		if g.Children {
			topics = append(topics, worker.Job{Topic: n.name}.ChildTopic(g.Number))
		}
	}
	return pick(random, topics...)
}

// moveLeaders gives partitions of a topic another leader, in good order: the next replica becomes the
// preferred one, and is elected.
func (n *nemesis) moveLeaders(ctx context.Context, topic string, random *rand.Rand) (string, error) {
	if fake := n.arena.kafka.Fake; fake != nil {
		partition := int32(random.IntN(n.plan.Scene.Partitions))
		from := fake.LeaderFor(topic, partition)
		to := (from + 1) % int32(n.arena.brokers)
		return fmt.Sprintf("%s/%d from %d to %d", topic, partition, from, to), fake.MoveTopicPartition(topic, partition, to)
	}
	listed, err := n.admin.ListTopicsWithInternal(ctx, topic)
	if err != nil {
		return topic, err
	}
	var change kadm.AlterPartitionAssignmentsReq
	var chosen kadm.TopicsSet
	for _, p := range listed[topic].Partitions.Sorted() {
		if len(p.Replicas) < 2 || p.Partition > 0 && random.IntN(2) == 0 {
			continue
		}
		next := 1 + random.IntN(len(p.Replicas)-1)
		change.Assign(topic, p.Partition, slices.Concat(p.Replicas[next:], p.Replicas[:next]))
		chosen.Add(topic, p.Partition)
	}
	if len(chosen) == 0 {
		return "", errSkipped
	}
	if _, err := n.admin.AlterPartitionAssignments(ctx, change); err != nil {
		return topic, err
	}
	elected, err := n.admin.ElectLeaders(ctx, kadm.ElectPreferredReplica, chosen)
	for _, partitions := range elected {
		for _, p := range partitions {
			if p.Err != nil && !errors.Is(p.Err, kerr.ElectionNotNeeded) {
				err = errors.Join(err, p.Err)
			}
		}
	}
	return topic, err
}

func (n *nemesis) moveCoordinators(ctx context.Context, random *rand.Rand) (string, error) {
	if fake := n.arena.kafka.Fake; fake != nil {
		fake.RehashCoordinators()
		return "of all groups and transactions", nil
	}
	return n.moveLeaders(ctx, pick(random, "__consumer_offsets", "__transaction_state"), random)
}

// subscribers returns the groups that handle a topic.
func (n *nemesis) subscribers(topic string) (numbers []int16) {
	for _, g := range n.plan.Scene.Groups {
		if g.Parent == 0 && topic == n.name || g.Parent > 0 && topic == (worker.Job{Topic: n.name}).ChildTopic(g.Parent) {
			numbers = append(numbers, g.Number)
		}
	}
	return numbers
}

// passed returns the offset of each partition up to which a group has handled a topic: the smaller one
// of its position and of its offset in Kafka. Partitions that an operator moves are left out.
func (n *nemesis) passed(ctx context.Context, group int16, topic string) (map[int32]int64, error) {
	id := worker.Job{Topic: n.name}.GroupID(group)
	committed, err := n.admin.FetchOffsetsForTopics(ctx, id, topic)
	if err == nil {
		err = committed.Error()
	}
	if err != nil {
		return nil, err
	}
	all := map[int32]int64{}
	var partition int32
	var next int64
	rows, _ := n.pool.Query(ctx, `SELECT partition, next_offset FROM effectonce.consumer_positions
WHERE consumer_group = $1 AND topic = $2 AND next_offset IS NOT NULL AND resume_at IS NULL`, id, topic)
	_, err = pgx.ForEachRow(rows, []any{&partition, &next}, func() error {
		if o, ok := committed.Lookup(topic, partition); ok && o.At >= 0 {
			all[partition] = min(next, o.At)
		}
		return nil
	})
	return all, err
}

// rewind stops a group, sets its offset of a partition back as kafka-consumer-groups does, and starts
// it again.
func (n *nemesis) rewind(ctx context.Context, random *rand.Rand) (_ string, err error) {
	n.offsets.Lock()
	defer n.offsets.Unlock()
	topic := n.drawTopic(random)
	group := pick(random, n.subscribers(topic)...)
	members := n.All(func(p *fleet.Process) bool {
		j := n.jobs[p.Name]
		return j.Role == worker.RoleConsumer && j.Group.Number == group
	})
	defer func() { err = errors.Join(err, fleet.Release(members)) }()
	if err := fleet.Hold(ctx, members, stopMax); err != nil {
		return "", err
	}
	passed, err := n.passed(ctx, group, topic)
	if err != nil {
		return "", err
	}
	starts, err := n.admin.ListStartOffsets(ctx, topic)
	if err != nil {
		return "", err
	}
	for partition, next := range passed {
		start, ok := starts.Lookup(topic, partition)
		if ok && start.Err == nil && next > start.Offset {
			at := max(start.Offset, next-1-random.Int64N(500))
			return n.rewindTo(ctx, worker.Job{Topic: n.name}.GroupID(group), topic, partition, at)
		}
	}
	return "", errSkipped
}

// commitMax is how long the offsets of a group that was stopped may be refused: until the session of a
// member that was killed is over.
const commitMax = 15 * time.Second

func (n *nemesis) rewindTo(ctx context.Context, group, topic string, partition int32, at int64) (string, error) {
	what := fmt.Sprintf("%s %s/%d to %d", group, topic, partition, at)
	ctx, cancel := context.WithTimeout(ctx, commitMax)
	defer cancel()
	offsets := kadm.Offsets{}
	offsets.AddOffset(topic, partition, at, -1)
	begun := time.Now().UnixNano()
	for {
		answer, err := n.admin.CommitOffsets(ctx, group, offsets)
		if err == nil {
			err = answer.Error()
		}
		if err == nil {
			return what, n.ledger.Write(ledger.Rewound, group, topic, partition, at, begun)
		}
		if !pause.For(ctx, 200*time.Millisecond) {
			return what, err
		}
	}
}

// deleteRecords deletes what every group has handled from the start of a partition. What is deleted is
// written to a file first, for the judge.
func (n *nemesis) deleteRecords(ctx context.Context, random *rand.Rand) (string, error) {
	n.offsets.Lock()
	defer n.offsets.Unlock()
	topic := n.drawTopic(random)
	var all map[int32]int64
	for _, group := range n.subscribers(topic) {
		passed, err := n.passed(ctx, group, topic)
		if err != nil {
			return "", err
		}
		if all == nil {
			all = passed
		}
		for partition := range all {
			if next, ok := passed[partition]; ok {
				all[partition] = min(all[partition], next)
			} else {
				delete(all, partition)
			}
		}
	}
	// The positions that were read have to outlive a crash: a commit that waits makes those before it
	// durable, too.
	if _, err := n.pool.Exec(ctx, `BEGIN; SET LOCAL synchronous_commit = on; SELECT pg_logical_emit_message(true, 'torture', ''); COMMIT`); err != nil {
		return "", err
	}
	extents, err := topicscan.Extents(ctx, n.client, time.Time{}, topic)
	if err != nil {
		return "", err
	}
	extent, before := topicscan.Extent{}, kadm.Offsets{}
	for partition, next := range all {
		span := extents[topic][partition]
		if next <= span.Start {
			continue
		}
		to := span.Start + 1 + random.Int64N(next-span.Start)
		extent[partition] = topicscan.Span{Start: span.Start, From: span.Start, End: to}
		before.AddOffset(topic, partition, to, -1)
	}
	if len(extent) == 0 {
		return "", errSkipped
	}
	if err := n.mirror(ctx, topic, extent); err != nil {
		return "", err
	}
	deleted, err := n.admin.DeleteRecords(ctx, before)
	if err == nil {
		err = deleted.Error()
	}
	return fmt.Sprintf("of %d partitions of %s", len(extent), topic), err
}

func (n *nemesis) mirror(ctx context.Context, topic string, extent topicscan.Extent) (err error) {
	file, err := os.OpenFile(filepath.Join(n.dir, judge.MirrorName), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	return judge.Mirror(ctx, []kgo.Opt{kgo.SeedBrokers(n.arena.kafka.Brokers...)}, map[string]topicscan.Extent{topic: extent}, file)
}

// addPartitions adds partitions to a topic under load.
func (n *nemesis) addPartitions(ctx context.Context, random *rand.Rand) (string, error) {
	topic, more := n.drawTopic(random), 1+random.IntN(2)
	if err := n.ledger.Write(ledger.Grown, topic); err != nil {
		return "", err
	}
	added, err := n.admin.CreatePartitions(ctx, more, topic)
	if err == nil {
		err = added.Error()
	}
	return strconv.Itoa(more) + " to " + topic, err
}
