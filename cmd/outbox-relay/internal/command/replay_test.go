package command_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/command"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// replay puts what the relay has published into the outbox again, of the times and the topic that are
// given, with the same IDs, bytes and order, each row once however often it was replayed, and leaves
// what waits, what is dead and what was discarded alone. The relay's prefix is its own. Without --yes
// it counts.
func TestReplayPublishesAgain(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	topic, other, copies := kafkatest.UnusedTopic(t), kafkatest.UnusedTopic(t), kafkatest.UnusedTopic(t)
	for name, partitions := range map[string]int{topic: 2, other: 1, copies: 1} {
		kafkatest.CreateTopic(t, "p-"+name, partitions)
	}
	drain := func() {
		r, err := relay.New(pool(t, address), []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}, relay.Config{TopicPrefix: "p-"})
		require.NoError(t, err)
		_, err = r.Drain(t.Context())
		require.NoError(t, err)
	}
	conn := connect(t, address)
	insert := func(from string, args ...any) {
		execSQL(t, conn, `INSERT INTO effectonce.outbox (topic, key, payload, headers, created_at) SELECT x.topic, x.key, x.payload, '{"a": ["1", null], "message-id": "forged", "effectonce-partition": 1}', '2026-01-01 00:00+00'::timestamptz + n * interval '1 second' FROM `+from, args...)
	}
	insert(`generate_series(1, 1200) n, LATERAL (SELECT $1, 'k'::bytea, n::text::bytea) x (topic, key, payload)`, topic)
	insert(`(VALUES (600, $1, ''::bytea, NULL::bytea), (600, 'dead', 'k', 'dead')) x (n, topic, key, payload)`, topic)
	execSQL(t, conn, `INSERT INTO effectonce.outbox (topic, payload, created_at) VALUES ($1, '', '2026-01-01 00:10+00')`, other)
	drain()
	execSQL(t, conn, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, headers, created_at, reason, error, state) SELECT 'default', seq, id, topic, headers, created_at, 'refused', '', 'discarded' FROM effectonce.outbox WHERE seq = 7`)
	insert(`(VALUES (600, $1, NULL::bytea, 'waits'::bytea)) x (n, topic, key, payload)`, topic)
	replay := func(args ...string) string {
		r := runOn(t, address, append([]string{"replay", "--from", "2026-01-01T00:00:02Z", "--to", "2026-01-01T00:20:00Z"}, args...)...)
		require.Zero(t, r.code, r.stderr)
		return r.stdout
	}

	assert.Equal(t, "{\"rows\":1199,\"done\":false}\n", replay("--json"), "1200 of the topic, not the first, the last and the discarded one; and two others")
	assert.Equal(t, "no actions\n", runOn(t, address, "actions", "list").stdout)
	assert.Equal(t, "1198 rows put into the outbox again, from where relays publish them\n", replay("--topic", topic, "--yes"))
	drain()
	assert.Equal(t, "1199 rows put into the outbox again, from where relays publish them\n", replay("--topic", topic, "--to-topic", copies, "--yes"), "with the row that waited")
	drain()
	first, again := kafkatest.ReadAll(t, "p-"+topic), kafkatest.ReadAll(t, "p-"+copies)
	require.Len(t, first, 1202+1198)
	require.Len(t, again, 1199)
	want := append(first[1:6:6], first[7:1199]...)
	for i, record := range append(want, first[1200:1202]...) {
		require.Equal(t, record.Key, again[i].Key)
		require.Equal(t, record.Value, again[i].Value)
		require.Equal(t, record.Headers, again[i].Headers)
		assert.WithinDuration(t, time.Now(), again[i].Timestamp, time.Hour)
	}
	assert.Contains(t, runOn(t, address, "actions", "list").stdout, "replay")
	r := runKafka(t, address, "verify", "--topic-prefix", "p-")
	assert.Zero(t, r.code, r.stdout+r.stderr)
	assert.Equal(t, 1, runKafka(t, address, "verify").code, "without the relay's prefix")
}

// A replay that is interrupted has done nothing.
func TestInterruptedReplayDoesNothing(t *testing.T) {
	t.Parallel()
	address, topic := published(t)
	conn := connect(t, address)
	execSQL(t, conn, `BEGIN`)
	execSQL(t, conn, `LOCK TABLE effectonce.operator_actions`)
	r := runOn(t, address, "replay", "--from", "2000-01-01T00:00:00Z", "--topic", topic, "--yes", "--timeout", "1s")
	assert.Equal(t, 1, r.code)
	execSQL(t, conn, `COMMIT`)
	assert.Contains(t, runOn(t, address, "verify", "--brokers", kafkatest.Brokers(t)[0]).stdout, "relay default: 3 rows, 3 of them published")
}

// What was published is well; a row that is gone from the topic is named, in both forms, with exit
// status 1.
func TestVerifyComparesOutboxAndTopic(t *testing.T) {
	t.Parallel()
	address, topic := published(t)
	r := runKafka(t, address, "verify")
	assert.Zero(t, r.code, r.stdout+r.stderr)
	assert.Equal(t, "relay default: 3 rows, 3 of them published; 3 records in 1 topic\nwell: nothing that was compared is missing or out of order; for what waits, see \"outbox-relay status\"\n", r.stdout)
	assert.Empty(t, r.stderr, "progress is for terminals")

	conn := connect(t, address)
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ($1), ($1)", topic)
	execSQL(t, conn, "UPDATE effectonce.outbox_advances SET floor = 5")
	r = runKafka(t, address, "verify", "--examples", "1")
	assert.Equal(t, 1, r.code)
	assert.Regexp(t, `(?m)^2 published rows are not in their topic: lost, .*\n  row [45] \(id \S+\) is published, but not in topic `+topic+`\n  and 1 more\nnot well\n$`, r.stdout)
	v := runKafka(t, address, "verify", "--json").object(t)
	assert.Equal(t, false, v["well"])
	assert.Len(t, v["missing"].(map[string]any)["examples"], 2)

	assert.Equal(t, 1, runKafka(t, address, "verify", "--relay", "other").code)
	assert.Contains(t, runKafka(t, address, "verify", "--group", "nobody").stderr, "check the name in --group")
	assert.Equal(t, 2, runOn(t, address, "verify").code, "without brokers")
}

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
	r, err := relay.New(pool(t, address), []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}, relay.Config{RecordBytesMax: 4 << 20})
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
	assert.Equal(t, result{1, "nothing is known of nobody\ntopic " + missing + " does not exist: was it deleted, or is its name misspelt?\n", ""}, r)
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

// tail shows rows as they commit, until it is interrupted or has shown enough; payloads only where
// asked. Row S3 of guarantees.md.
func TestTailFollows(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('t', E'k\\\\033', 'CANARY'), ('t', 'k', NULL)")
	r := runOn(t, address, "tail", "--from-beginning", "--limit", "2")
	assert.Zero(t, r.code, r.stderr)
	assert.Regexp(t, `(?m)^\S+Z  1  t  base64:axs=  \S{36}  6 bytes\n\S+Z  2  t  k  \S{36}  tombstone\n$`, r.stdout)
	assertNoCanary(t, r, "tail")
	r = runOn(t, address, "tail", "--from-beginning", "--limit", "1", "--payload", "--json", "--topic", "t")
	assert.Equal(t, "CANARY", r.object(t)["payload"])

	ctx, interrupt := context.WithCancel(t.Context())
	out := newOutput()
	done := make(chan int, 1)
	go func() {
		done <- command.Execute(ctx, []string{"tail", "--json", "--every", "10ms", "--from-beginning"}, map[string]string{"DATABASE_URL": address}, out, newOutput())
	}()
	out.await(t, `"seq":2`)
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ('later')")
	out.await(t, `"topic":"later"`)
	interrupt()
	assert.Zero(t, testwait.Chan(t, "the command's end", done), "an interrupt is how it ends")
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	require.Len(t, lines, 3)
	for _, line := range lines {
		assert.True(t, json.Valid([]byte(line)), line)
	}
}

// status --watch shows it again until it is interrupted.
func TestStatusWatches(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	ctx, interrupt := context.WithCancel(t.Context())
	out := newOutput()
	done := make(chan int, 1)
	go func() {
		done <- command.Execute(ctx, []string{"status", "--json", "--interval", "0s", "--watch", "100ms"}, map[string]string{"DATABASE_URL": address}, out, newOutput())
	}()
	out.await(t, `"waiting":0`)
	execSQL(t, connect(t, address), insertTwo)
	out.await(t, `"waiting":2`)
	interrupt()
	assert.Zero(t, testwait.Chan(t, "the command's end", done))
}
