package consumer

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkaclient"
	"github.com/effectonce/effectonce/internal/pause"
)

// ErrUnknownTopic is returned by Run if one of Config.Topics does not exist. Nothing was consumed.
// Remedy: create the topic, or correct its name. A client that may create topics
// (kgo.AllowAutoTopicCreation) waits for them.
var ErrUnknownTopic = errors.New("topic does not exist")

const (
	// missingLooks is how often a topic is looked up before it counts as missing: a broker learns
	// of a new topic only after the controller has answered.
	missingLooks = 4
	// missingPause is the pause between two lookups.
	missingPause = 500 * time.Millisecond
)

// topicsExist waits for brokers that do not answer yet, then returns ErrUnknownTopic for topics
// that they do not know. A topic that the consumer may not read does not count as missing: the
// session reports that error.
func (c *Consumer) topicsExist(ctx context.Context) error {
	client, err := kafkaclient.New(c.kafka...)
	if err != nil {
		return fmt.Errorf("kafka options: %w", err)
	}
	defer client.Close()
	if created, _ := client.OptValue(kgo.AllowAutoTopicCreation).(bool); created {
		return nil
	}
	for attempt, looks := 1, 1; ctx.Err() == nil; attempt++ {
		missing, err := missingTopics(ctx, client, c.engine.cfg.Topics)
		wait := missingPause
		switch {
		case err != nil:
			wait = c.engine.backoff(attempt)
			c.engine.cfg.Logger.WarnContext(ctx, "waiting for Kafka", "group", c.engine.cfg.Group, "error", err, "retry_in", readable(wait))
			c.enter(PhaseStarting, err)
		case len(missing) == 0:
			return nil
		case looks >= missingLooks:
			return fmt.Errorf("%w: %s (Config.Topics of group %q): create it, or correct the name",
				ErrUnknownTopic, strings.Join(missing, ", "), c.engine.cfg.Group)
		default:
			looks++
		}
		pause.For(ctx, wait)
	}
	return nil
}

// missingTopics lists the topics that the brokers do not know.
func missingTopics(ctx context.Context, client *kgo.Client, topics []string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, takeOverMax)
	defer cancel()
	metadata, err := kadm.NewClient(client).Metadata(ctx, topics...)
	if err != nil {
		return nil, fmt.Errorf("ask Kafka for topics: %w", err)
	}
	var missing []string
	for _, name := range topics {
		if topic, ok := metadata.Topics[name]; !ok || errors.Is(topic.Err, kerr.UnknownTopicOrPartition) {
			missing = append(missing, name)
		}
	}
	return missing, nil
}
