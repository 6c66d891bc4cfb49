package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"runtime/debug"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/worker"
	"github.com/effectonce/effectonce/outbox"
)

// watermillRival publishes with the SQL publisher and the forwarder's envelope in the transaction,
// forwards with the forwarder, and consumes with a router.
type watermillRival struct{}

func watermillSettings() string {
	return "Watermill " + version("github.com/ThreeDotsLabs/watermill") + ", watermill-sql " + version("github.com/ThreeDotsLabs/watermill-sql/v4") +
		", watermill-kafka " + version("github.com/ThreeDotsLabs/watermill-kafka/v3") + ". " +
		"Writers: the SQL publisher with `forwarder.NewPublisher`, in the transaction of the order, all messages in one call. " +
		"Forwarder: the SQL subscriber with `DefaultPostgreSQLSchema` and one consumer group for all replicas, polls every 50 ms, " +
		"retries after 200 ms; the Kafka publisher with acks of all replicas, an idempotent producer, and the order's key as partition key. " +
		"Consumers: the Kafka subscriber with a consumer group, sessions of 6 s, offsets committed every second, from the oldest; " +
		"a router with `Deduplicator` (key: the message's UUID; `NewMapExpiringKeyRepository` of 10 minutes, the repository that Watermill has) " +
		"outside of `Retry` (1,000 retries from 100 ms to 1 s, `ResetContextOnRetry`), `Recoverer`, and a handler with one database transaction for each message."
}

// version of a module in this program.
func version(path string) string {
	info, _ := debug.ReadBuildInfo()
	for _, dep := range info.Deps {
		if dep.Path == path {
			return dep.Version
		}
	}
	return "of an unknown version"
}

const (
	forwarderTopic = "orders"
	// metadataKey has the order's key: messages with one key go to one partition.
	metadataKey = "key"
)

func schema() sql.DefaultPostgreSQLSchema {
	return sql.DefaultPostgreSQLSchema{GenerateMessagesTableName: func(topic string) string { return "shop.watermill_" + topic }}
}

func offsets() sql.DefaultPostgreSQLOffsetsAdapter {
	return sql.DefaultPostgreSQLOffsetsAdapter{GenerateMessagesOffsetsTableName: func(topic string) string { return "shop.watermill_offsets_" + topic }}
}

// Prepare creates the tables: a publisher in a transaction must not.
func (watermillRival) Prepare(ctx context.Context, pool *pgxpool.Pool, _ worker.Job) error {
	messages, err := schema().SchemaInitializingQueries(sql.SchemaInitializingQueriesParams{Topic: forwarderTopic})
	if err != nil {
		return err
	}
	acked, err := offsets().SchemaInitializingQueries(sql.OffsetsSchemaInitializingQueriesParams{Topic: forwarderTopic})
	if err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		for _, q := range append(messages, acked...) {
			if _, err := tx.Exec(ctx, q.Query, q.Args...); err != nil {
				return err
			}
		}
		_, err := tx.Exec(ctx, `
GRANT INSERT ON shop.watermill_orders TO torture_publisher, torture_consumer;
GRANT SELECT, UPDATE, DELETE ON shop.watermill_orders TO torture_relay;
GRANT SELECT, INSERT, UPDATE ON shop.watermill_offsets_orders TO torture_relay;
GRANT USAGE ON ALL SEQUENCES IN SCHEMA shop TO torture_publisher, torture_consumer`)
		return err
	})
}

// Publish publishes in the transaction.
func (watermillRival) Publish(ctx context.Context, tx pgx.Tx, messages ...outbox.Message) error {
	p, err := sql.NewPublisher(sql.TxFromPgx(tx), sql.PublisherConfig{SchemaAdapter: schema()}, nil)
	if err != nil {
		return err
	}
	enveloped := forwarder.NewPublisher(p, forwarder.PublisherConfig{ForwarderTopic: forwarderTopic})
	all := make([]*message.Message, len(messages))
	for i, m := range messages {
		if m.ID == uuid.Nil {
			m.ID = uuid.Must(uuid.NewV7())
		}
		all[i] = message.NewMessageWithContext(ctx, m.ID.String(), message.Payload(m.Payload))
		all[i].Metadata.Set(metadataKey, string(m.Key))
		all[i].Metadata.Set(worker.HeaderID, m.ID.String())
	}
	if len(all) == 0 {
		return nil
	}
	return enveloped.Publish(messages[0].Topic, all...) // they are all for one topic
}

func marshaler() kafka.MarshalerUnmarshaler {
	return kafka.NewWithPartitioningMarshaler(func(_ string, m *message.Message) (string, error) { return m.Metadata.Get(metadataKey), nil })
}

// Relay runs a forwarder.
func (watermillRival) Relay(ctx context.Context, pool *pgxpool.Pool, j worker.Job, logger *slog.Logger) error {
	log := watermill.NewSlogLogger(logger)
	in, err := sql.NewSubscriber(sql.BeginnerFromPgx(pool), sql.SubscriberConfig{
		ConsumerGroup: "forwarder", SchemaAdapter: schema(), OffsetsAdapter: offsets(),
		PollInterval: 50 * time.Millisecond, RetryInterval: 200 * time.Millisecond, ResendInterval: 200 * time.Millisecond,
	}, log)
	if err != nil {
		return err
	}
	return untilWell(ctx, logger, func() error {
		config := through(kafka.DefaultSaramaSyncPublisherConfig(), j)
		config.Producer.RequiredAcks, config.Producer.Idempotent, config.Net.MaxOpenRequests = sarama.WaitForAll, true, 1
		out, err := kafka.NewPublisher(kafka.PublisherConfig{Brokers: j.Brokers, Marshaler: marshaler(), OverwriteSaramaConfig: config}, log)
		if err != nil {
			return err
		}
		defer func() { _ = out.Close() }()
		f, err := forwarder.NewForwarder(in, out, log, forwarder.Config{ForwarderTopic: forwarderTopic, CloseTimeout: 5 * time.Second})
		if err != nil {
			return err
		}
		return f.Run(ctx)
	})
}

// untilWell repeats what fails while the servers are away, as the orchestrator of a program would that
// ends then.
func untilWell(ctx context.Context, logger *slog.Logger, run func() error) error {
	for ctx.Err() == nil {
		if err := run(); err != nil && ctx.Err() == nil {
			logger.Info("it ended, and is started again", "error", err)
		}
		select {
		case <-time.After(500 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	return nil
}

// Consume runs a router.
func (r watermillRival) Consume(ctx context.Context, pool *pgxpool.Pool, j worker.Job, logger *slog.Logger) error {
	log := watermill.NewSlogLogger(logger)
	seen, err := middleware.NewMapExpiringKeyRepository(10 * time.Minute)
	if err != nil {
		return err
	}
	duplicates := &middleware.Deduplicator{KeyFactory: func(m *message.Message) (string, error) { return m.UUID, nil }, Repository: seen, Timeout: time.Second}
	again := middleware.Retry{MaxRetries: 1000, InitialInterval: 100 * time.Millisecond, MaxInterval: time.Second, Multiplier: 2, ResetContextOnRetry: true, Logger: log}
	return untilWell(ctx, logger, func() error {
		config := through(kafka.DefaultSaramaSubscriberConfig(), j)
		config.Consumer.Offsets.Initial = sarama.OffsetOldest
		config.Consumer.Group.Session.Timeout, config.Consumer.Group.Heartbeat.Interval = worker.Session, 500*time.Millisecond
		config.Consumer.Group.Rebalance.Timeout = worker.Session
		in, err := kafka.NewSubscriber(kafka.SubscriberConfig{
			Brokers: j.Brokers, Unmarshaler: marshaler(), OverwriteSaramaConfig: config, ConsumerGroup: j.GroupID(j.Group.Number),
		}, log)
		if err != nil {
			return err
		}
		router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 5 * time.Second}, log)
		if err != nil {
			return err
		}
		router.AddMiddleware(duplicates.Middleware, again.Middleware, middleware.Recoverer)
		router.AddConsumerHandler("orders", j.Consumed(), in, func(m *message.Message) error { return r.handle(pool, j, m) })
		return router.Run(ctx)
	})
}

func (r watermillRival) handle(pool *pgxpool.Pool, j worker.Job, m *message.Message) error {
	var b scene.Body
	if err := json.Unmarshal(m.Payload, &b); err != nil {
		return nil // garbage is passed over
	}
	ctx, cancel := context.WithTimeout(m.Context(), worker.HandledWithin)
	defer cancel()
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return worker.Affect(ctx, tx, j, r, b) })
}

// through makes a client of Kafka use its own ways to the brokers.
func through(config *sarama.Config, j worker.Job) *sarama.Config {
	config.Version = sarama.V3_6_0_0
	if len(j.Through) > 0 {
		config.Net.Proxy.Enable, config.Net.Proxy.Dialer = true, ways(j.Through)
	}
	return config
}

type ways map[string]string

// Dial leads to the proxy of an address.
func (w ways) Dial(network, address string) (net.Conn, error) {
	if way, ok := w[address]; ok {
		address = way
	}
	return net.DialTimeout(network, address, 10*time.Second)
}
