package main_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// runConsumer runs a consumer that writes every value into effects, except "bad" ones before they
// are fixed.
func runConsumer(t *testing.T, pool *pgxpool.Pool, topic string, fixed *atomic.Bool) {
	t.Helper()
	handler := consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if strings.HasSuffix(string(msg.Value), "bad") && !fixed.Load() {
			return consumer.Permanent(errors.New("no such account"))
		}
		_, err := tx.Exec(ctx, "INSERT INTO effects (value) VALUES ($1)", string(msg.Value))
		return err
	})
	c, err := consumer.New(pool, []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}, handler, consumer.Config{
		Group: topic, Topics: []string{topic}, RetryMin: time.Millisecond, RetryMax: 10 * time.Millisecond, ParkShareMax: 1,
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		assert.NoError(t, <-done)
	})
}

// Rows C15, C17 of guarantees.md: what an operator does with the commands, a running consumer
// follows: what is retried has its effect once, in the order of its key; what is discarded never
// has it, and what was behind it continues.
func TestConsumersFollowTheOperator(t *testing.T) {
	t.Parallel()
	address, topic := pgtest.Database(t), kafkatest.Topic(t, 1)
	conn := connect(t, address)
	execSQL(t, conn, "CREATE TABLE effects (n bigserial, value text)")
	pool, err := pgxpool.New(t.Context(), address)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	var fixed atomic.Bool
	client := kafkatest.Client(t)
	for _, value := range []string{"a:bad", "b:1", "a:2", "c:bad", "c:2", "a:3", "c:3"} {
		require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: topic, Key: []byte(value[:1]), Value: []byte(value)}).FirstErr())
	}
	runConsumer(t, pool, topic, &fixed)
	effects := func() (values []string) {
		rows, err := conn.Query(t.Context(), "SELECT value FROM effects ORDER BY n")
		require.NoError(t, err)
		values, err = pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return values
	}
	require.Eventually(t, func() bool { return len(parkedRows(t, conn)) == 6 }, commandMax, 10*time.Millisecond)
	require.Equal(t, []string{"b:1"}, effects())

	r := runOn(t, address, "parked", "retry", "--key", "a", "--wait")
	assert.Equal(t, 1, r.code, r.stderr)
	assert.Contains(t, r.stdout, "0 handled, 1 failed again\n")
	assert.Contains(t, r.stdout, ": permanent: no such account\n")
	fixed.Store(true)
	r = runOn(t, address, "parked", "retry", "--key", "a", "--wait")
	assert.Zero(t, r.code, "%+v", r)
	assert.Equal(t, []string{"b:1", "a:bad", "a:2", "a:3"}, effects())

	r = runOn(t, address, "parked", "discard", "--key", "c", "--why", "test order")
	assert.Zero(t, r.code, "%+v", r)
	require.Eventually(t, func() bool { return len(parkedRows(t, conn)) == 0 }, commandMax, 10*time.Millisecond)
	assert.Equal(t, []string{"c:2", "c:3"}, slices.DeleteFunc(effects(), func(v string) bool { return v[0] != 'c' }))
	assert.Zero(t, runOn(t, address, "status", "--interval", "0s").code)
}
