package doctor

import (
	"context"
	"errors"
	"strings"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
)

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
