package inspect_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/inspect"
	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const schema = "effectonce"

func exec(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	_, err := pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err, sql)
}

func scalar[T any](t *testing.T, pool *pgxpool.Pool, sql string, args ...any) (v T) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), sql, args...).Scan(&v), sql)
	return v
}

func options(t *testing.T) []kgo.Opt {
	t.Helper()
	return []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}
}

func kafka(t *testing.T) *inspect.Kafka {
	t.Helper()
	return &inspect.Kafka{Client: kafkatest.Client(t), Options: options(t)}
}

// publish lets a relay publish what waits.
func publish(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	r, err := relay.New(pool, options(t), relay.Config{})
	require.NoError(t, err)
	_, err = r.Drain(t.Context())
	require.NoError(t, err)
}

// consume runs a consumer until a condition holds in the database.
func consume(t *testing.T, pool *pgxpool.Pool, topic string, handler consumer.Handler, until string) {
	t.Helper()
	c, err := consumer.New(pool, options(t), handler, consumer.Config{Group: "g-" + topic, Topics: []string{topic}})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	testwait.True(t, until, func() bool { return scalar[bool](t, pool, until) })
	cancel()
	require.NoError(t, testwait.Chan(t, "the consumer's end", done))
}

func explain(t *testing.T, pool *pgxpool.Pool, k *inspect.Kafka, text string) *inspect.Explanation {
	t.Helper()
	found, err := inspect.Explain(t.Context(), pool, k, inspect.Question{Schema: schema, Text: text, Since: time.Hour, ScanMax: 1000})
	require.NoError(t, err)
	return found
}

func nothing(context.Context, pgx.Tx, *consumer.Message) error { return nil }
