package main_test

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

	main "github.com/effectonce/effectonce/cmd/outbox-relay"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// replay publishes what the relay has published, of the times and the topic that are given, with
// the same IDs, bytes and order, and leaves the relay's progress, what waits, what is dead and what
// was discarded alone; a dry run counts.
func TestReplayPublishesAgain(t *testing.T) {
	t.Parallel()
	address, topic, other, copies := pgtest.Database(t), kafkatest.Topic(t, 1), kafkatest.Topic(t, 1), kafkatest.Topic(t, 1)
	conn := connect(t, address)
	execSQL(t, conn, `INSERT INTO effectonce.outbox (topic, key, payload, headers, created_at)
		SELECT $1, 'k', n::text::bytea, '{"a": ["1", null], "message-id": "forged"}', '2026-01-01 00:00+00'::timestamptz + n * interval '1 second' FROM generate_series(1, 1200) n`, topic)
	execSQL(t, conn, `INSERT INTO effectonce.outbox (topic, key, payload, created_at) VALUES ($1, '', NULL, '2026-01-01 00:10+00'), ($2, NULL, '', '2026-01-01 00:10+00'), ('dead', 'k', 'dead', '2026-01-01 00:10+00')`, topic, other)
	drain(t, address)
	execSQL(t, conn, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, headers, created_at, reason, error, state) SELECT 'default', seq, id, topic, headers, created_at, 'refused', '', 'discarded' FROM effectonce.outbox WHERE seq = 7`)
	execSQL(t, conn, `INSERT INTO effectonce.outbox (topic, payload, created_at) VALUES ($1, 'waits', '2026-01-01 00:10+00')`, topic)
	const progress = `SELECT string_agg(p::text, ' ') FROM effectonce.outbox_progress_now p`
	var before, after string
	require.NoError(t, conn.QueryRow(t.Context(), progress).Scan(&before))
	replay := func(args ...string) result {
		return runKafka(t, address, append([]string{"replay", "--from", "2026-01-01T00:00:02Z", "--to", "2026-01-01T00:20:00Z"}, args...)...)
	}

	dry := replay("--dry-run", "--json")
	assert.Zero(t, dry.code, dry.stderr)
	assert.EqualValues(t, 1199, dry.object(t)["rows"], "1200 of the topic, not the first, the last and the discarded one; and two others")
	assert.Zero(t, kafkatest.Count(t, copies))
	r := replay("--topic", topic, "--to-topic", copies)
	require.Zero(t, r.code, r.stderr)
	assert.Equal(t, "1198 of 1198 rows published again\n", r.stdout)
	first, again := kafkatest.ReadAll(t, topic), kafkatest.ReadAll(t, copies)
	require.Len(t, again, 1198)
	want := append(first[1:6:6], first[7:1199]...)
	for i, record := range append(want, first[1200]) {
		require.Equal(t, record.Key, again[i].Key)
		require.Equal(t, record.Value, again[i].Value)
		require.Equal(t, record.Headers, again[i].Headers)
		assert.WithinDuration(t, time.Now(), again[i].Timestamp, time.Hour)
	}
	require.NoError(t, conn.QueryRow(t.Context(), progress).Scan(&after))
	assert.Equal(t, before, after)
	assert.Contains(t, runOn(t, address, "actions", "list").stdout, "replay")
}

// A row is sent again up to the size that its topic takes, in its place; at one that is larger the
// replay ends, names it and what to do, and sends no later row of its key.
func TestReplayOfLargeRows(t *testing.T) {
	t.Parallel()
	address, topic := pgtest.Database(t), kafkatest.Topic(t, 1, "max.message.bytes", "4194304")
	large, small := kafkatest.Topic(t, 1, "max.message.bytes", "4194304"), kafkatest.Topic(t, 1)
	conn := connect(t, address)
	execSQL(t, conn, `INSERT INTO effectonce.outbox (topic, key, payload)
		SELECT $1, 'k', convert_to(rpad(n::text, CASE n WHEN 2 THEN 2000000 ELSE 1 END, 'x'), 'UTF8') FROM generate_series(1, 3) n`, topic)
	drain(t, address)
	sent := func(topic string) (all string) {
		for _, record := range kafkatest.ReadAll(t, topic) {
			all += string(record.Value[:1])
		}
		return all
	}
	replay := func(topic string) result {
		return runKafka(t, address, "replay", "--from", "2026-01-01T00:00:00Z", "--to-topic", topic)
	}

	r := replay(large)
	require.Zero(t, r.code, r.stderr)
	assert.Equal(t, "123", sent(large))

	r = replay(small)
	assert.Equal(t, 1, r.code)
	assert.Regexp(t, `1 row published again: row 2 \(id \S{36}\) has 2000\d{3} bytes as a record, max\.message\.bytes of topic "`+small+`" is 1048588: raise it`, r.stderr)
	assert.Equal(t, "1", sent(small))
	kafkatest.Configure(t, small, "max.message.bytes", "4194304")
	// What a broker shows it may apply a moment later.
	testwait.True(t, "the broker takes large records", func() bool { return replay(small).code == 0 })
	assert.Regexp(t, "^11+23$", sent(small))
}

// Between two ticks are the rows that were committed between them, in whatever order their seq is;
// without an end, all since then. A tick that is not there is an error that says what else there
// is.
func TestReplayFromATick(t *testing.T) {
	t.Parallel()
	address, topic, copies := pgtest.Database(t), kafkatest.Topic(t, 1), kafkatest.Topic(t, 1)
	conn, late := connect(t, address), connect(t, address)
	insert := `INSERT INTO effectonce.outbox (topic, payload) VALUES ($1, $2)`
	execSQL(t, conn, insert, topic, "before")
	execSQL(t, late, "BEGIN")
	execSQL(t, late, insert, topic, "late")
	ticks := make([]string, 3)
	for n := range ticks {
		drain(t, address)
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT tick::text FROM effectonce.outbox_progress_now`).Scan(&ticks[n]))
		if n == 0 {
			execSQL(t, late, "COMMIT")
		}
		execSQL(t, conn, insert, topic, ticks[n])
	}
	drain(t, address)

	r := runKafka(t, address, "replay", "--from", ticks[0], "--to", ticks[1], "--to-topic", copies)
	require.Zero(t, r.code, r.stderr)
	r = runKafka(t, address, "replay", "--from", ticks[2], "--topic", topic, "--to-topic", copies)
	require.Zero(t, r.code, r.stderr)
	var payloads []string
	for _, record := range kafkatest.ReadAll(t, copies) {
		payloads = append(payloads, string(record.Value))
	}
	assert.Equal(t, []string{"late", ticks[0], ticks[2]}, payloads)
	var from string
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT subject->>'from' FROM effectonce.operator_actions WHERE what = 'replay' ORDER BY id LIMIT 1`).Scan(&from))
	assert.Equal(t, ticks[0], from)

	r = runKafka(t, address, "replay", "--from", "4711000")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stderr, "there is no tick 4711000")
}

// Property: verify and replay look for rows, and send them, under the relay's prefix. Without it
// verify says that rows are missing.
func TestVerifyAndReplayKnowThePrefix(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	name := kafkatest.UnusedTopic(t)
	kafkatest.CreateTopic(t, "p-"+name, 1)
	execSQL(t, connect(t, address), `INSERT INTO effectonce.outbox (topic, key, payload) SELECT $1, 'k', n::text::bytea FROM generate_series(1, 10) n`, name)
	r, err := relay.New(pool(t, address), []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}, relay.Config{TopicPrefix: "p-"})
	require.NoError(t, err)
	_, err = r.Drain(t.Context())
	require.NoError(t, err)
	require.Equal(t, 10, kafkatest.Count(t, "p-"+name))

	found := runKafka(t, address, "verify", "--json", "--topic-prefix", "p-")
	require.Zero(t, found.code, found.stderr+found.stdout)
	require.EqualValues(t, 10, found.object(t)["records"])
	found = runKafka(t, address, "verify", "--json")
	require.Equal(t, 1, found.code)

	again := runKafka(t, address, "replay", "--from", "2026-01-01T00:00:00Z", "--topic-prefix", "p-")
	require.Zero(t, again.code, again.stderr)
	require.Equal(t, "10 of 10 rows published again\n", again.stdout)
	require.Equal(t, 20, kafkatest.Count(t, "p-"+name))
}

// Property: a topic that does not exist is refused before anything is published, and the replay is
// not written down as done.
func TestReplayToNoTopicIsRefused(t *testing.T) {
	t.Parallel()
	address, _ := published(t)
	missing := kafkatest.UnusedTopic(t)
	r := runKafka(t, address, "replay", "--from", "2000-01-01T00:00:00Z", "--to-topic", missing)
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stderr, "topic "+missing+": UNKNOWN_TOPIC_OR_PARTITION")
	assert.Contains(t, r.stderr, "nothing was published; create it, or check the name")
	assert.Equal(t, "no actions\n", runOn(t, address, "actions", "list").stdout)
}

// What was published is well; a row that is gone from the topic is named, in both forms, with exit
// status 1.
func TestVerifyComparesOutboxAndTopic(t *testing.T) {
	t.Parallel()
	address, topic := published(t)
	r := runKafka(t, address, "verify")
	assert.Zero(t, r.code, r.stdout+r.stderr)
	assert.Equal(t, "relay default: 3 rows, 3 of them published; 3 records in 1 topic\nwell\n", r.stdout)
	assert.Empty(t, r.stderr, "progress is for terminals")

	conn := connect(t, address)
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ($1), ($1)", topic)
	execSQL(t, conn, "UPDATE effectonce.outbox_advances SET floor = 5")
	r = runKafka(t, address, "verify", "--examples", "1")
	assert.Equal(t, 1, r.code)
	assert.Regexp(t, `(?m)^2 published rows are not in their topic\n  row [45] \(id \S+\) is published, but not in topic `+topic+`\n  and 1 more\nnot well\n$`, r.stdout)
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
		done <- main.Execute(ctx, []string{"tail", "--json", "--every", "10ms", "--from-beginning"}, map[string]string{"DATABASE_URL": address}, out, newOutput())
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
		done <- main.Execute(ctx, []string{"status", "--json", "--interval", "0s", "--watch", "100ms"}, map[string]string{"DATABASE_URL": address}, out, newOutput())
	}()
	out.await(t, `"waiting":0`)
	execSQL(t, connect(t, address), insertTwo)
	out.await(t, `"waiting":2`)
	interrupt()
	assert.Zero(t, testwait.Chan(t, "the command's end", done))
}
