package main_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

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
	execSQL(t, conn, `INSERT INTO effectonce.operator_actions (who, what, why, subject) SELECT 'me', 'dead.discard', 'x', jsonb_build_object('relay', 'default', 'seq', 7)`)
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
