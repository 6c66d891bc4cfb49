package doctor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/consumers"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
	"github.com/effectonce/effectonce/outbox"
)

// TopicRowsMax bounds how many waiting rows, and how many dead rows, are searched for topics.
const TopicRowsMax = 10_000

const checkBrokers = "check --brokers, the network, that Kafka runs, and whether it requires --kafka-tls and --kafka-sasl-mechanism"

// slowly completes the remedy for a broker that did not answer within the time limit.
func slowly(err error, remedy string) string {
	if errors.Is(err, context.DeadlineExceeded) {
		remedy += "; if it only answers slowly, raise --timeout"
	}
	return remedy
}

// Brokers checks that every broker answers, also at the address that the cluster advertises for it.
// ctx limits how long it waits.
func Brokers(ctx context.Context, admin *kadm.Client, seeds string) []Finding {
	meta, err := admin.BrokerMetadata(ctx)
	if err != nil {
		return []Finding{fail("brokers", slowly(err, checkBrokers), "no broker of %s answers: %v", seeds, err)}
	}
	versions, err := admin.ApiVersions(ctx)
	if err != nil {
		return []Finding{fail("brokers", slowly(err, checkBrokers), "the brokers of %s do not answer: %v", seeds, err)}
	}
	var found []Finding
	for _, b := range meta.Brokers {
		if v := versions[b.NodeID]; v.Err != nil {
			found = append(found, fail("brokers", slowly(v.Err, "advertised.listeners of that broker must hold an address that this machine reaches"),
				"broker %d does not answer at %s:%d, the address that the cluster advertises for it: %v", b.NodeID, b.Host, b.Port, v.Err))
		}
	}
	return orElse(found, ok("brokers", "%d of %d brokers answer", len(meta.Brokers), len(meta.Brokers)))
}

// Topics checks each topic that a waiting or a dead row names, with the relay's
// prefix. The topic has to exist, the largest waiting row has to fit, and the topic has to
// keep acknowledged records. ctx limits how long Topics waits for brokers.
func Topics(ctx context.Context, db operator.Querier, admin *kadm.Client, schema, prefix string) []Finding {
	wanted, err := wantedTopics(ctx, db, schema, prefix)
	if err != nil {
		return broken("topics", err)
	}
	if len(wanted) == 0 {
		return []Finding{ok("topics", "no waiting or dead row names a topic")}
	}
	names := slices.Sorted(maps.Keys(wanted))
	details, err := listTopics(ctx, admin, names)
	if err != nil {
		return broken("topics", err)
	}
	var existing []string
	var found []Finding
	replicas := replicasOfNew(ctx, admin)
	for _, name := range names {
		absent := missing(name, details, replicas)
		if found = append(found, absent...); len(absent) == 0 {
			existing = append(existing, name)
		}
	}
	if len(existing) == 0 {
		return found
	}
	configs, err := topicConfigs(ctx, admin, existing)
	if err != nil {
		return append(found, broken("topics", err)...)
	}
	for _, config := range configs {
		found = append(found, topic(config, wanted[config.Name], details[config.Name])...)
	}
	slices.SortStableFunc(found, func(a, b Finding) int { return strings.Compare(a.Check, b.Check) })
	return found
}

// perTopic asks about topics in one request, or in one for each if one of them may not be described: a
// request for all of them fails then.
func perTopic(names []string, ask func(names ...string) error, refused func(name string, err error)) error {
	err := ask(names...)
	var denied *kadm.AuthError
	if !errors.As(err, &denied) {
		return err
	}
	for _, name := range names {
		switch err := ask(name); {
		case errors.As(err, &denied):
			refused(name, denied.Err)
		case err != nil:
			return err
		}
	}
	return nil
}

func listTopics(ctx context.Context, admin *kadm.Client, names []string) (kadm.TopicDetails, error) {
	all := kadm.TopicDetails{}
	return all, perTopic(names, func(names ...string) error {
		details, err := admin.ListTopics(kadm.WithAuthorizedOps(ctx), names...)
		if err == nil {
			maps.Copy(all, details)
		}
		return err
	}, func(name string, err error) { all[name] = kadm.TopicDetail{Topic: name, Err: err} })
}

func topicConfigs(ctx context.Context, admin *kadm.Client, names []string) (all kadm.ResourceConfigs, err error) {
	err = perTopic(names, func(names ...string) error {
		configs, err := admin.DescribeTopicConfigs(ctx, names...)
		if err == nil {
			all = append(all, configs...)
		}
		return err
	}, func(name string, err error) { all = append(all, kadm.ResourceConfig{Name: name, Err: err}) })
	return all, err
}

func missing(name string, details kadm.TopicDetails, replicas int) []Finding {
	check, d := "topic "+name, details[name]
	switch {
	case consumers.Absent(details, name):
		remedy := "create the topic: " + createTopic(name, replicas) + "   # the rows that wait for it are then published automatically"
		return []Finding{fail(check, remedy, "it does not exist")}
	case errors.Is(d.Err, kerr.TopicAuthorizationFailed):
		const remedy = "grant DESCRIBE and WRITE on the topic: the rows that wait for it are then published automatically"
		return []Finding{fail(check, remedy, "not allowed: %v", d.Err)}
	case d.Err != nil:
		return []Finding{fail(check, "see the brokers' logs", "%v", d.Err)}
	}
	return nil
}

// topic checks the settings of a topic that exists, and the rights of the user of these connections, which should be
// the relay's; brokers before 2.3 do not report those. largest is the size of the largest record that waits for it; 0:
// only dead rows name it.
func topic(config kadm.ResourceConfig, largest int64, detail kadm.TopicDetail) []Finding {
	check, allowed := "topic "+config.Name, detail.AuthorizedOperations
	switch {
	case slices.Contains(allowed, kadm.OpDescribe) && !slices.Contains(allowed, kadm.OpWrite):
		const remedy = "grant WRITE on the topic: the rows that wait for it are then published automatically"
		return []Finding{fail(check, remedy, "this user may describe it, but not write to it")}
	case config.Err != nil:
		const remedy = "grant DESCRIBE_CONFIGS on the topic: doctor then compares its limits with the rows that wait"
		return []Finding{warn(check, remedy, "its settings cannot be read: %v", config.Err)}
	}
	maxBytes, knownMax := setting(config, "max.message.bytes")
	inSync, knownInSync := setting(config, "min.insync.replicas")
	replicas := int64(detail.Partitions.NumReplicas())
	var found []Finding
	switch {
	case knownMax && largest > maxBytes:
		found = append(found, fail(check, alterTopic(config.Name, "max.message.bytes", largest)+"   # before the relay reaches the row; otherwise the row goes to outbox_dead",
			"max.message.bytes is %d, the largest waiting row makes a record of about %d", maxBytes, largest))
	case largest > relayBytesMax:
		found = append(found, fail(check, "store the body elsewhere and publish a reference to it; outbox.Config.RecordBytesMax rejects such rows",
			"the largest waiting row makes a record of about %d bytes, the relay publishes none above %d", largest, relayBytesMax))
	case knownMax && maxBytes < outbox.RecordBytesMaxDefault:
		found = append(found, warn(check, alterTopic(config.Name, "max.message.bytes", messageBytesStandard)+"   # or set RecordBytesMax of the publishing programs below it",
			"max.message.bytes is %d, but outbox.Publish accepts records of %d bytes by default", maxBytes, outbox.RecordBytesMaxDefault))
	}
	switch {
	case knownInSync && inSync > replicas:
		found = append(found, fail(check, alterTopic(config.Name, "min.insync.replicas", max(replicas-1, 1))+"   # or add replicas: kafka-reassign-partitions.sh",
			"min.insync.replicas is %d, but it has %s: nothing can be published", inSync, human.Count(replicas, "replica")))
	case replicas < 2:
		found = append(found, warn(check, "use three replicas and min.insync.replicas=2: kafka-reassign-partitions.sh (not needed on a single test broker)", "it has one replica: the loss of one broker loses acknowledged records"))
	case knownInSync && inSync < 2:
		found = append(found, warn(check, alterTopic(config.Name, "min.insync.replicas", 2), "min.insync.replicas is 1: although the relay waits for all in-sync replicas (acks=all), a record may be acknowledged by one broker only and be lost with it"))
	case knownInSync && inSync == replicas:
		found = append(found, warn(check, alterTopic(config.Name, "min.insync.replicas", replicas-1)+"   # or add a replica", "min.insync.replicas is %d, as many as it has replicas: while one broker is down, even for a restart, nothing is published", inSync))
	}
	return orElse(found, ok(check, "%s, %s", human.Count(len(detail.Partitions), "partition"), human.Count(replicas, "replica")))
}

// relayBytesMax is the largest record that the relay publishes, whatever the topic accepts.
const relayBytesMax = 90_000_000

// messageBytesStandard is Kafka's default for message.max.bytes.
const messageBytesStandard = 1_048_588

// alterTopic returns the command that changes one setting of a topic. A topic's name needs no
// quotes.
func alterTopic(topic, name string, value int64) string {
	return fmt.Sprintf("kafka-configs.sh --bootstrap-server \"$KAFKA_BROKERS\" --alter --entity-type topics --entity-name %s --add-config %s=%d", topic, name, value)
}

// replicasOfNew returns how many replicas a new topic should have: three, or the number of brokers
// if there are fewer.
func replicasOfNew(ctx context.Context, admin *kadm.Client) int {
	meta, err := admin.BrokerMetadata(ctx)
	if err != nil {
		return 3
	}
	return min(max(len(meta.Brokers), 1), 3)
}

// createTopic returns the command that creates a topic.
func createTopic(name string, replicas int) string {
	return fmt.Sprintf("kafka-topics.sh --bootstrap-server \"$KAFKA_BROKERS\" --create --topic %s --partitions 12 --replication-factor %d --config min.insync.replicas=%d",
		name, replicas, max(replicas-1, 1))
}

func setting(config kadm.ResourceConfig, name string) (int64, bool) {
	n, err := strconv.ParseInt(text(config, name), 10, 64)
	return n, err == nil
}

// wantedTopics returns the topics that rows name, under their names in Kafka, with the approximate
// bytes of the largest record that waits for each; 0: only dead rows name it.
func wantedTopics(ctx context.Context, db operator.Querier, schema, prefix string) (map[string]int64, error) {
	all, err := pipeline.ShardsOf(ctx, db, schema, "")
	if err != nil {
		return nil, err
	}
	waiting, err := pipeline.Topics(ctx, db, schema, all, TopicRowsMax)
	if err != nil {
		return nil, err
	}
	overhead := int64((&outbox.Message{}).RecordBytes())
	wanted := map[string]int64{}
	for name, largest := range waiting {
		wanted[prefix+name] = overhead + largest
	}
	dead, err := operator.Rows(ctx, db, "read topics of dead rows", schema, deadTopicsSQL, pgx.RowTo[string], TopicRowsMax)
	if err != nil {
		return nil, err
	}
	for _, name := range dead {
		wanted[prefix+name] = max(wanted[prefix+name], 0)
	}
	return wanted, nil
}

// ProgressTopic checks the topic in which relays with --exactly-once keep their progress.
// There is no finding without the topic.
func ProgressTopic(ctx context.Context, admin *kadm.Client, name string) []Finding {
	check := "progress topic " + name
	details, err := admin.ListTopics(ctx, name)
	if err != nil {
		return broken(check, err)
	}
	detail, listed := details[name]
	if !listed || errors.Is(detail.Err, kerr.UnknownTopicOrPartition) {
		return nil
	}
	if detail.Err != nil {
		return []Finding{warn(check, "grant DESCRIBE, READ and WRITE on the topic", "it cannot be described: %v", detail.Err)}
	}
	var found []Finding
	if n := len(detail.Partitions); n > 1 {
		found = append(found, fail(check, "stop the relays, then start them with another --progress-topic: they create it with one partition", "it has %s: want 1", human.Count(n, "partition")))
	}
	configs, err := admin.DescribeTopicConfigs(ctx, name)
	if err != nil || len(configs) == 0 || configs[0].Err != nil {
		for _, c := range configs {
			err = errors.Join(err, c.Err)
		}
		return append(found, warn(check, "grant DESCRIBE_CONFIGS on the topic", "its settings cannot be read: %v", err))
	}
	if !strings.Contains(text(configs[0], "cleanup.policy"), "compact") {
		found = append(found, warn(check, "set its cleanup.policy to compact",
			"it is not compacted: it grows, or loses the progress of an idle shard"))
	}
	return orElse(found, ok(check, "one partition, compacted"))
}

func text(config kadm.ResourceConfig, name string) string {
	for _, entry := range config.Configs {
		if entry.Key == name {
			return entry.MaybeValue()
		}
	}
	return ""
}
