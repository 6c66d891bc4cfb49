package main

import (
	"context"
	"net"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/integration/torture"
	"github.com/effectonce/effectonce/outbox"
)

// watermillRival publishes through Watermill's forwarder, and handles with its router: the deduplicator, within it
// retries of a failing message, a transaction of its own for each.
type watermillRival struct{}

const (
	forwarded = "outbox" // the forwarder's topic, and table
	keyField  = "key"
	closeMax  = 5 * time.Second
	// remembers is how long the deduplicator does.
	remembers = time.Hour
	// triesMax of a message, retryAfter apart: longer than everything fails here. Behind them Watermill delivers it
	// again, and the deduplicator drops it.
	triesMax = 1000
)

func (watermillRival) SetUp(_ context.Context, pool *pgxpool.Pool) error {
	stored, err := sql.NewSubscriber(sql.BeginnerFromPgx(pool), subscriberConfig(), nil)
	if err != nil {
		return err
	}
	defer func() { _ = stored.Close() }()
	return stored.SubscribeInitialize(forwarded)
}

func subscriberConfig() sql.SubscriberConfig {
	return sql.SubscriberConfig{
		ConsumerGroup: "forwarder", SchemaAdapter: sql.DefaultPostgreSQLSchema{}, OffsetsAdapter: sql.DefaultPostgreSQLOffsetsAdapter{},
		PollInterval: polls, ResendInterval: retryAfter, RetryInterval: retryAfter,
	}
}

func (watermillRival) Publish(ctx context.Context, tx pgx.Tx, m outbox.Message) error {
	stores, err := sql.NewPublisher(sql.TxFromPgx(tx), sql.PublisherConfig{SchemaAdapter: sql.DefaultPostgreSQLSchema{}}, nil)
	if err != nil {
		return err
	}
	id := watermill.NewUUID()
	w := message.NewMessageWithContext(ctx, id, m.Payload)
	w.Metadata.Set(keyField, string(m.Key))
	w.Metadata.Set(outbox.HeaderMessageID, id)
	return forwarder.NewPublisher(stores, forwarder.PublisherConfig{ForwarderTopic: forwarded}).Publish(m.Topic, w)
}

func (watermillRival) Relay(ctx context.Context, p *torture.Process) error {
	stored, err := sql.NewSubscriber(sql.BeginnerFromPgx(p.Pool), subscriberConfig(), nil)
	if err != nil {
		return err
	}
	config := network(p, kafka.DefaultSaramaSyncPublisherConfig())
	config.Producer.RequiredAcks, config.Producer.Idempotent, config.Net.MaxOpenRequests = sarama.WaitForAll, true, 1
	published, err := kafka.NewPublisher(kafka.PublisherConfig{
		Brokers: p.Brokers, OverwriteSaramaConfig: config, Marshaler: kafka.NewWithPartitioningMarshaler(func(_ string, m *message.Message) (string, error) {
			return m.Metadata.Get(keyField), nil
		}),
	}, watermill.NopLogger{})
	if err != nil {
		return err
	}
	defer func() { _ = published.Close() }()
	forwards, err := forwarder.NewForwarder(stored, published, watermill.NopLogger{}, forwarder.Config{ForwarderTopic: forwarded, CloseTimeout: closeMax})
	if err != nil {
		return err
	}
	return forwards.Run(ctx)
}

func (watermillRival) Consume(ctx context.Context, p *torture.Process, group string, topics []string, handle torture.Handle) error {
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: closeMax}, watermill.NopLogger{})
	if err != nil {
		return err
	}
	repository, err := middleware.NewMapExpiringKeyRepository(remembers)
	if err != nil {
		return err
	}
	deduplicator := &middleware.Deduplicator{KeyFactory: middleware.NewMessageHasherFromMetadataField(outbox.HeaderMessageID), Repository: repository}
	router.AddMiddleware(
		deduplicator.Middleware,
		middleware.Retry{MaxRetries: triesMax, InitialInterval: retryAfter, MaxInterval: retryAfter}.Middleware,
		middleware.Recoverer,
	)
	config := network(p, kafka.DefaultSaramaSubscriberConfig())
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	config.Consumer.IsolationLevel = sarama.ReadCommitted
	received, err := kafka.NewSubscriber(kafka.SubscriberConfig{
		Brokers: p.Brokers, ConsumerGroup: group, OverwriteSaramaConfig: config, Unmarshaler: kafka.DefaultMarshaler{}, ReconnectRetrySleep: retryAfter,
	}, watermill.NopLogger{})
	if err != nil {
		return err
	}
	for _, topic := range topics {
		router.AddConsumerHandler(topic, topic, received, func(m *message.Message) error {
			return pgx.BeginFunc(m.Context(), p.Pool, func(tx pgx.Tx) error { return handle(m.Context(), tx, m.Payload) })
		})
	}
	return router.Run(ctx)
}

// network is the process's.
func network(p *torture.Process, config *sarama.Config) *sarama.Config {
	config.Version = sarama.V2_8_0_0
	config.Net.Proxy.Enable, config.Net.Proxy.Dialer = true, dialer(p.Dial)
	config.Net.ReadTimeout, config.Net.WriteTimeout = deliversMax, deliversMax
	config.Consumer.Group.Session.Timeout, config.Consumer.Group.Heartbeat.Interval = 6*time.Second, 500*time.Millisecond
	config.Metadata.Retry.Backoff = retryAfter
	return config
}

type dialer func(ctx context.Context, network, address string) (net.Conn, error)

func (d dialer) Dial(network, address string) (net.Conn, error) {
	return d(context.Background(), network, address)
}
