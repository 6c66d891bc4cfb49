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

	"github.com/effectonce/effectonce/outbox"
)

// TopicRowsMax bounds how many waiting rows, and how many dead ones, are searched for topics.
const TopicRowsMax = 10_000

const checkBrokers = "check --brokers, the network, that Kafka runs, and whether it asks for --kafka-tls and --kafka-sasl-mechanism"

// Brokers checks that every broker answers, also at the address that the cluster gives for it. ctx
// limits how long it waits.
func Brokers(ctx context.Context, admin *kadm.Client, seeds string) []Finding {
	meta, err := admin.BrokerMetadata(ctx)
	if err != nil {
		return []Finding{fail("brokers", checkBrokers, "no broker of %s answers: %v", seeds, err)}
	}
	versions, err := admin.ApiVersions(ctx)
	if err != nil {
		return []Finding{fail("brokers", checkBrokers, "the brokers of %s do not answer: %v", seeds, err)}
	}
	var found []Finding
	for _, b := range meta.Brokers {
		if v := versions[b.NodeID]; v.Err != nil {
			found = append(found, fail("brokers", "advertised.listeners of that broker must hold an address that this machine reaches",
				"broker %d does not answer at %s:%d, the address that the cluster gives for it: %v", b.NodeID, b.Host, b.Port, v.Err))
		}
	}
	if len(found) == 0 {
		found = append(found, ok("brokers", "%d of %d brokers answer", len(meta.Brokers), len(meta.Brokers)))
	}
	return found
}

// wantedTopic is a topic that rows of the outbox name.
type wantedTopic struct {
	largest int64 // bytes of the largest waiting record, about; 0: only dead rows name it
}

// Topics checks each topic that a waiting or a dead row names: that it exists, that the largest waiting
// row fits, and that it keeps what it acknowledged. ctx limits how long it waits for brokers.
func Topics(ctx context.Context, db Querier, admin *kadm.Client, schema string) []Finding {
	wanted, err := wantedTopics(ctx, db, schema)
	if err != nil {
		return broken("topics", err)
	}
	if len(wanted) == 0 {
		return []Finding{ok("topics", "no waiting or dead row names a topic")}
	}
	names := slices.Sorted(maps.Keys(wanted))
	details, err := admin.ListTopics(ctx, names...)
	if err != nil {
		return broken("topics", err)
	}
	var existing []string
	var found []Finding
	for _, name := range names {
		if f := missing(name, details); f != nil {
			found = append(found, *f)
			continue
		}
		existing = append(existing, name)
	}
	if len(existing) == 0 {
		return found
	}
	configs, err := admin.DescribeTopicConfigs(ctx, existing...)
	if err != nil {
		return append(found, broken("topics", err)...)
	}
	for _, config := range configs {
		if config.Err != nil {
			found = append(found, warn("topic "+config.Name, "grant DESCRIBE_CONFIGS on the topic", "its settings cannot be read: %v", config.Err))
			continue
		}
		found = append(found, topic(config, wanted[config.Name], details[config.Name])...)
	}
	slices.SortStableFunc(found, func(a, b Finding) int { return strings.Compare(a.Check, b.Check) })
	return found
}

func missing(name string, details kadm.TopicDetails) *Finding {
	d, listed := details[name]
	var f Finding
	switch {
	case listed && d.Err == nil:
		return nil
	case !listed || errors.Is(d.Err, kerr.UnknownTopicOrPartition) || errors.Is(d.Err, kerr.InvalidTopicException):
		f = fail("topic "+name, "create the topic: rows that wait for it are then published by themselves", "it does not exist")
	case errors.Is(d.Err, kerr.TopicAuthorizationFailed):
		f = fail("topic "+name, "grant DESCRIBE and WRITE on the topic", "not allowed: %v", d.Err)
	default:
		f = fail("topic "+name, "see the brokers' logs", "%v", d.Err)
	}
	return &f
}

// topic judges the settings of a topic that exists.
func topic(config kadm.ResourceConfig, wanted wantedTopic, detail kadm.TopicDetail) []Finding {
	check := "topic " + config.Name
	maxBytes, knownMax := setting(config, "max.message.bytes")
	inSync, knownInSync := setting(config, "min.insync.replicas")
	replicas := int64(detail.Partitions.NumReplicas())
	var found []Finding
	switch {
	case knownMax && wanted.largest > maxBytes:
		found = append(found, fail(check, "raise max.message.bytes of the topic before the relay gets there, else the row goes to outbox_dead",
			"max.message.bytes is %d, the largest waiting row makes a record of about %d", maxBytes, wanted.largest))
	case knownMax && maxBytes < outbox.RecordBytesMaxDefault:
		found = append(found, warn(check, "raise max.message.bytes, or set RecordBytesMax of the programs that publish below it",
			"max.message.bytes is %d, but outbox.Publish accepts records of %d bytes unless configured", maxBytes, outbox.RecordBytesMaxDefault))
	}
	switch {
	case knownInSync && inSync > replicas:
		found = append(found, fail(check, "lower min.insync.replicas or add replicas", "min.insync.replicas is %d, but it has %d replicas: nothing can be published", inSync, replicas))
	case replicas < 2:
		found = append(found, warn(check, "three replicas and min.insync.replicas=2 (not on a single test broker)", "it has one replica: what Kafka acknowledged is lost with one broker"))
	case knownInSync && inSync < 2:
		found = append(found, warn(check, "set min.insync.replicas to 2", "min.insync.replicas is 1: a record may be acknowledged by one broker and lost with it"))
	}
	if len(found) == 0 {
		found = append(found, ok(check, "%d partitions, %d replicas", len(detail.Partitions), replicas))
	}
	return found
}

func setting(config kadm.ResourceConfig, name string) (int64, bool) {
	for _, entry := range config.Configs {
		if entry.Key == name && entry.Value != nil {
			n, err := strconv.ParseInt(*entry.Value, 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

func wantedTopics(ctx context.Context, db Querier, schema string) (map[string]wantedTopic, error) {
	all, err := ReadProgress(ctx, db, schema)
	if err != nil {
		return nil, err
	}
	system := systemIdentifier(ctx, db)
	overhead := int64((&outbox.Message{}).RecordBytes())
	wanted := map[string]wantedTopic{}
	for _, p := range named(all, "") {
		if p.moved(system) {
			p.aboveFloor()
		}
		rows, err := db.Query(ctx, inSchema(waitingTopicsSQL, schema), p.waiting().args(TopicRowsMax)...)
		if err != nil {
			return nil, fmt.Errorf("read topics of waiting rows: %w", err)
		}
		var name string
		var largest int64
		_, err = pgx.ForEachRow(rows, []any{&name, &largest}, func() error {
			wanted[name] = wantedTopic{largest: max(overhead+largest, wanted[name].largest)}
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("read topics of waiting rows: %w", err)
		}
	}
	rows, err := db.Query(ctx, inSchema(deadTopicsSQL, schema), TopicRowsMax)
	if err != nil {
		return nil, fmt.Errorf("read topics of dead rows: %w", err)
	}
	dead, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("read topics of dead rows: %w", err)
	}
	for _, name := range dead {
		wanted[name] = wantedTopic{largest: wanted[name].largest}
	}
	return wanted, nil
}
