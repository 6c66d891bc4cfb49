package main_test

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/relay"
)

// published is a database with three rows of two keys in a topic, as a relay published them.
func published(t *testing.T) (address, topic string) {
	t.Helper()
	address, topic = pgtest.Database(t), kafkatest.Topic(t, 2)
	execSQL(t, connect(t, address), `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'a', 'CANARY'), ($1, 'a', 'CANARY'), ($1, 'b', NULL)`, topic)
	drain(t, address)
	return address, topic
}

// drain publishes all waiting rows.
func drain(t *testing.T, address string) {
	t.Helper()
	r, err := relay.New(pool(t, address), []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}, relay.Config{})
	require.NoError(t, err)
	_, err = r.Drain(t.Context())
	require.NoError(t, err)
}

// runKafka runs a command line on a database and on Kafka.
func runKafka(t *testing.T, address string, args ...string) result {
	t.Helper()
	return run(t, map[string]string{"DATABASE_URL": address, "OUTBOX_BROKERS": strings.Join(kafkatest.Brokers(t), ",")}, args...)
}

// Payloads are not shown, also of a message for later; exit status 1 if nothing is known of what is
// asked for, 2 if it is asked for in the wrong way. Row S3 of guarantees.md.
func TestExplainIsATimeline(t *testing.T) {
	t.Parallel()
	address, topic := published(t)
	assertNoCanary(t, runKafka(t, address, "explain", topic+"/0/0"), "explain")
	missing := kafkatest.UnusedTopic(t)
	r := runKafka(t, address, "explain", "nobody", "--topic", missing)
	assert.Equal(t, result{1, "nothing is known of nobody\ntopic " + missing + " does not exist: is its name misspelt?\n", ""}, r)
	for _, args := range [][]string{{"explain"}, {"explain", "a", "b"}, {"explain", ""}, {"explain", "x", "--scan-max", "0"}} {
		assert.Equal(t, 2, runKafka(t, address, args...).code, args)
	}
	const later = "0192f0c1-2b3c-7def-8123-456789abcdef"
	execSQL(t, connect(t, address), "INSERT INTO effectonce.outbox_scheduled (due_at, id, topic, key, payload) VALUES (clock_timestamp() - interval '1 hour', $1, 'reminders', 'a', 'CANARY')", later)
	r = runOn(t, address, "explain", later)
	assert.Regexp(t, `(?m)^\S+Z  later     scheduled for \S+Z, overdue for 1h[0m\ds]*: topic reminders, key a, 6 bytes$`, r.stdout)
	assert.Contains(t, r.stdout, "topics were not searched: give --brokers")
	assertNoCanary(t, r, "explain")
}

// What the database knows is shown while no broker answers, and so is the error: exit status 1.
func TestExplainAndPositionsWhileKafkaIsAway(t *testing.T) {
	t.Parallel()
	address, topic := published(t)
	conn := connect(t, address)
	execSQL(t, conn, "INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, next_offset) VALUES ('billing', $1, 0, 5)", topic)
	var id string
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT id::text FROM effectonce.outbox WHERE seq = 2").Scan(&id))
	away := func(args ...string) result {
		return run(t, map[string]string{"DATABASE_URL": address, "OUTBOX_BROKERS": "127.0.0.1:1"}, args...)
	}
	r := away("explain", id)
	assert.Equal(t, 1, r.code)
	assert.Regexp(t, `(?m)^\S+Z  outbox    topic `+topic+`, key a, seq 2, 6 bytes; relay default: published$`, r.stdout)
	assert.Regexp(t, `(?m)^topics were not searched, or not to their end: Kafka: .*127\.0\.0\.1:1`, r.stdout)
	r = away("positions")
	assert.Equal(t, 1, r.code)
	assert.Regexp(t, `(?m)^default +0 +0 +`, r.stdout)
	assert.Regexp(t, `(?m)^billing +`+topic+`/0 +5 +- +- `, r.stdout)
	assert.Regexp(t, `(?m)^topics and groups are incomplete: Kafka: .*127\.0\.0\.1:1`, r.stdout)
	v := away("positions", "--json").object(t)
	assert.Len(t, v["consumers"], 1)
	assert.Contains(t, v["kafka_error"], "127.0.0.1:1")
}

func pool(t *testing.T, address string) *pgxpool.Pool {
	t.Helper()
	p, err := pgxpool.New(t.Context(), address)
	require.NoError(t, err)
	t.Cleanup(p.Close)
	return p
}
