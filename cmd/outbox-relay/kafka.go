package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// kafkaOptions returns the client options to connect to the brokers.
func (s *settings) kafkaOptions(logger *slog.Logger) []kgo.Opt {
	return append(s.kafka.options(s.insecure, brokersMax), kgo.SeedBrokers(s.brokers...), kgo.WithLogger(kafkaLog{logger}))
}

// askKafka returns a client for queries. It gives up after limit, and returns a request's error
// instead of retrying.
func (s *settings) askKafka(limit time.Duration) (*kgo.Client, error) {
	return kgo.NewClient(append(s.kafka.options(s.insecure, limit), kgo.SeedBrokers(s.brokers...), kgo.RetryTimeout(limit),
		kgo.RequestRetries(0), kgo.SoftwareNameAndVersion("outbox-relay", "v1"))...)
}

// kafkaLog forwards the client's log, above all that brokers are unreachable.
type kafkaLog struct{ logger *slog.Logger }

func (l kafkaLog) Level() kgo.LogLevel {
	if l.logger.Enabled(context.Background(), slog.LevelDebug) {
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
	l.logger.Log(context.Background(), at, "kafka: "+msg, keyvals...)
}
