package command

import (
	"errors"
	"regexp"

	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
)

var topicPrefix = regexp.MustCompile(`^[a-zA-Z0-9._-]*$`)

// addTopicPrefix adds the flag of relay.Config.TopicPrefix.
func addTopicPrefix(flags *pflag.FlagSet, prefix *string) {
	cli.AddText(flags, "topic-prefix", 200, "prefix of every topic's name in Kafka", func(text string) error {
		*prefix = text
		if !topicPrefix.MatchString(text) {
			return errors.New("want letters, digits, dots, underscores and hyphens")
		}
		return nil
	})
}
