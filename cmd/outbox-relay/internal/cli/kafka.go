package cli

import (
	"context"
	"log/slog"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// BrokersMax is how long a connection to a broker may take, and how long a start waits for one
// before it logs that none answers.
const BrokersMax = 5 * time.Second

// KafkaOptions returns the client options to connect to the brokers.
func (s *Settings) KafkaOptions(logger *slog.Logger) []kgo.Opt {
	return append(s.kafka.options(s.insecure, BrokersMax), kgo.SeedBrokers(s.Brokers...), kgo.WithLogger(kafkaLog{logger}))
}

// KafkaClient returns a client for queries. It gives up after limit, and returns a request's error
// instead of retrying.
func (s *Settings) KafkaClient(limit time.Duration) (*kgo.Client, error) {
	return kgo.NewClient(append(s.kafka.options(s.insecure, limit), kgo.SeedBrokers(s.Brokers...), kgo.RetryTimeout(limit),
		kgo.RequestRetries(0), kgo.SoftwareNameAndVersion("outbox-relay", "v1"))...)
}

// kafkaLog forwards the client's log, above all that brokers are unreachable.
type kafkaLog struct{ logger *slog.Logger }

func (l kafkaLog) Level() kgo.LogLevel {
	if l.logger.Enabled(context.Background(), slog.LevelDebug) { //nolint:forbidigo // kgo.Logger has no context
		return kgo.LogLevelDebug
	}
	return kgo.LogLevelWarn
}

func (l kafkaLog) Log(level kgo.LogLevel, msg string, keyvals ...any) {
	at := slog.LevelDebug
	switch level { //nolint:exhaustive // None is never logged, Debug is the value above
	case kgo.LogLevelError:
		at = slog.LevelError
	case kgo.LogLevelWarn:
		at = slog.LevelWarn
	case kgo.LogLevelInfo:
		at = slog.LevelInfo
	}
	l.logger.Log(context.Background(), at, "kafka: "+msg, keyvals...) //nolint:forbidigo // kgo.Logger has no context
}
