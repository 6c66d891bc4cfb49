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

// A message is shown as a timeline or as one object, never its payload; exit status 1 if nothing is
// known of it, 2 if it is asked for in the wrong way. Row S3 of guarantees.md.
func TestExplainIsATimeline(t *testing.T) {
	t.Parallel()
	address, topic := published(t)
	var id string
	require.NoError(t, connect(t, address).QueryRow(t.Context(), "SELECT id::text FROM effectonce.outbox WHERE seq = 2").Scan(&id))
	r := runKafka(t, address, "explain", id)
	assert.Zero(t, r.code, r.stderr)
	assert.Regexp(t, `(?m)^\S+Z  outbox    topic `+topic+`, key a, seq 2, 6 bytes; relay default: published$`, r.stdout)
	assert.Regexp(t, `(?m)^\S+Z  topic     `+topic+`/\d/1, key a, message-id `+id+`$`, r.stdout)
	assert.Contains(t, r.stdout, "not claimed\n")
	assertNoCanary(t, r, "explain")

	r = runOn(t, address, "explain", id)
	assert.Contains(t, r.stdout, "topics were not searched: give --brokers")
	v := runKafka(t, address, "explain", id, "--json").object(t)
	assert.Equal(t, true, v["known"])
	assert.Len(t, v["records"], 1)
	assert.Equal(t, []any{}, v["claims"])

	r = runKafka(t, address, "explain", "nobody", "--topic", topic)
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stdout, "nothing is known of nobody\nnot in topic "+topic)
	missing := kafkatest.UnusedTopic(t)
	assert.Equal(t, "nothing is known of nobody\ntopic "+missing+" does not exist: is its name misspelt?\n", runKafka(t, address, "explain", "nobody", "--topic", missing).stdout)
	assert.Equal(t, "nothing is known of nobody\ntopics were not searched: no row and no consumer names one: give --topic\n", runKafka(t, address, "explain", "nobody").stdout)
	for _, args := range [][]string{{"explain"}, {"explain", "a", "b"}, {"explain", ""}, {"explain", "x", "--scan-max", "0"}} {
		assert.Equal(t, 2, runKafka(t, address, args...).code, args)
	}
}

// A message for later is known before it is in the outbox: until when it waits, and that it is
// overdue.
func TestExplainKnowsMessagesForLater(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	const id = "0192f0c1-2b3c-7def-8123-456789abcdef"
	conn := connect(t, address)
	execSQL(t, conn, "INSERT INTO effectonce.outbox_scheduled (due_at, id, topic, key, payload) VALUES ('2100-01-02 03:04:05Z', $1, 'reminders', 'a', 'CANARY')", id)
	r := runOn(t, address, "explain", id)
	assert.Zero(t, r.code, r.stderr)
	assert.Regexp(t, `(?m)^\S+Z  later     scheduled for 2100-01-02T03:04:05.000Z: topic reminders, key a, 6 bytes$`, r.stdout)
	assertNoCanary(t, r, "explain")
	execSQL(t, conn, "UPDATE effectonce.outbox_scheduled SET due_at = clock_timestamp() - interval '1 hour'")
	assert.Regexp(t, `scheduled for \S+Z, overdue for 1h[0m\ds]*: topic reminders`, runOn(t, address, "explain", id).stdout)
	v := runOn(t, address, "explain", id, "--json").object(t)
	assert.Len(t, v["scheduled"], 1)
	assert.Equal(t, []any{}, runOn(t, address, "explain", "nobody", "--json").object(t)["scheduled"])
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
	assert.NotContains(t, r.stderr, "error: ")
	assert.Regexp(t, `(?m)^\S+Z  outbox    topic `+topic+`, key a, seq 2, 6 bytes; relay default: published$`, r.stdout)
	assert.Regexp(t, `(?m)^topics were not searched, or not to their end: Kafka: .*127\.0\.0\.1:1`, r.stdout)
	v := away("explain", id, "--json").object(t)
	assert.Len(t, v["outbox"], 1)
	assert.Contains(t, v["kafka_error"], "127.0.0.1:1")
	assert.Equal(t, false, v["searched"].(map[string]any)["complete"])
	r = away("explain", topic+"/0/1")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stdout, "nothing is known of "+topic+"/0/1\ntopics were not searched, or not to their end: Kafka: ")
	assert.Empty(t, runKafka(t, address, "explain", id, "--json").object(t)["kafka_error"])

	r = away("positions")
	assert.Equal(t, 1, r.code)
	assert.NotContains(t, r.stderr, "error: ")
	assert.Regexp(t, `(?m)^default +0 +0 +`, r.stdout)
	assert.Regexp(t, `(?m)^billing +`+topic+`/0 +5 +- +- `, r.stdout)
	assert.Regexp(t, `(?m)^topics and groups are incomplete: Kafka: .*127\.0\.0\.1:1`, r.stdout)
	v = away("positions", "--json").object(t)
	assert.Len(t, v["shards"], 1)
	assert.Len(t, v["consumers"], 1)
	assert.Contains(t, v["kafka_error"], "127.0.0.1:1")
	assert.Zero(t, runKafka(t, address, "positions").code)
}

func pool(t *testing.T, address string) *pgxpool.Pool {
	t.Helper()
	p, err := pgxpool.New(t.Context(), address)
	require.NoError(t, err)
	t.Cleanup(p.Close)
	return p
}
