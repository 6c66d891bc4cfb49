package main_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	main "github.com/effectonce/effectonce/cmd/outbox-relay"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: topics are not paused under an unknown relay name if other relays exist, since no relay
// would see the pause; before the first relay runs, any name is allowed.
func TestPauseUnderAnotherNameIsRefused(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	assert.Contains(t, runOn(t, address, "topics", "pause", "early", "--force").stdout, "1 of 1 topic paused")
	execSQL(t, conn, "INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('eu-1', 1)")
	for _, verb := range []string{"pause", "resume"} {
		r := runOn(t, address, "topics", verb, "orders")
		assert.Equal(t, 1, r.code)
		assert.Contains(t, r.stderr, "relay default: no relay of this name ever ran on this outbox; known: eu-1: give one with --relay")
	}
	assert.Contains(t, runOn(t, address, "topics", "pause", "orders", "--force", "--relay", "eu-1").stdout, "1 of 1 topic paused")
}

// Property: a pause says whether it holds, and the exit status agrees: not without a replica, not
// before each one that runs has confirmed it.
func TestPauseSaysWhetherItHolds(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	r := runOn(t, address, "topics", "pause", "orders", "--force")
	assert.Equal(t, 1, r.code)
	assert.Equal(t, "1 of 1 topic paused; no replica of the relay runs: the pause is stored, and holds once one runs\n", r.stdout)
	execSQL(t, conn, "INSERT INTO effectonce.outbox_replicas (relay, owner, alive_until, obeys) VALUES ('default', 'a', 'infinity', '{}')")
	// Long enough for a look, also on a busy machine.
	r = runOn(t, address, "topics", "pause", "orders", "--wait", "2s")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stdout, "0 of 1 topic paused; the pause was not confirmed within 2s by a: rows read before it may still be published")
	v := runOn(t, address, "topics", "pause", "orders", "--wait", "2s", "--json").object(t)
	assert.Equal(t, map[string]any{"paused": []any{}, "holds": false, "unconfirmed": []any{"a"}}, v)
	r = runOn(t, address, "topics", "pause", "orders", "--wait", "0s")
	assert.Zero(t, r.code)
	assert.Contains(t, r.stdout, "did not wait")
	execSQL(t, conn, "UPDATE effectonce.outbox_replicas SET obeys = ARRAY(SELECT id FROM effectonce.outbox_paused)")
	r = runOn(t, address, "topics", "pause", "orders")
	assert.Zero(t, r.code)
	assert.Equal(t, "0 of 1 topic paused; the pause holds\n", r.stdout)
}

// Property: a topic that neither exists nor has rows is not paused, unless that is forced; rows
// that wait anywhere are enough, and so is Kafka's word.
func TestPauseOfAnUnknownTopicIsRefused(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ('in-outbox')")
	execSQL(t, conn, "INSERT INTO effectonce.outbox_scheduled (due_at, topic) VALUES ('2999-01-01', 'in-scheduled')")
	execSQL(t, conn, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, headers, created_at, reason, error, state)
		VALUES ('default', 1, gen_random_uuid(), 'in-dead', '{}', now(), 'refused', 'e', 'held')`)
	paused := func() (n int) {
		require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM effectonce.outbox_paused").Scan(&n))
		return n
	}
	r := runOn(t, address, "topics", "pause", "in-outbox", "misspelt", "--wait", "0s")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stderr, "topic misspelt has no rows; with --brokers Kafka is asked whether it exists: nothing was paused; --force pauses it anyway")
	existing, missing := kafkatest.Topic(t, 1), kafkatest.UnusedTopic(t)
	r = runKafka(t, address, "topics", "pause", existing, missing, "--wait", "0s")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stderr, "topic "+missing+" has no rows and does not exist in Kafka")
	assert.Zero(t, paused())
	r = runOn(t, address, "topics", "pause", "in-outbox", "in-scheduled", "in-dead", "--wait", "0s")
	assert.Zero(t, r.code, r.stderr)
	r = runKafka(t, address, "topics", "pause", existing, "--wait", "0s")
	assert.Zero(t, r.code, r.stderr)
	r = runKafka(t, address, "topics", "pause", missing, "--wait", "0s", "--force")
	assert.Zero(t, r.code, r.stderr)
	assert.Equal(t, 5, paused())
}

// Property: the status names the topics that are paused, with and without rows, and how the pause
// is ended.
func TestStatusNamesPausedTopics(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	execSQL(t, conn, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, headers, created_at, reason, error, state)
		SELECT 'default', n, gen_random_uuid(), 'orders', '{}', now(), CASE n WHEN 1 THEN 'paused' ELSE 'behind' END, 'e', 'held' FROM generate_series(1, 3) n`)
	assert.Equal(t, 1, runOn(t, address, "topics", "pause", "empty", "orders", "--force", "--by", "ana", "--why", "INC-12").code)
	execSQL(t, conn, "INSERT INTO effectonce.outbox_progress (relay, shard) VALUES ('default', 0)")
	r := runOn(t, address, "status", "--interval", "0s")
	assert.Regexp(t, `(?m)^note: relay "default": topic empty is paused since \S+Z by ana \(INC-12\), none of its rows wait: to end the pause, run "outbox-relay topics resume empty --relay default"$`, r.stdout)
	assert.Regexp(t, `(?m)^note: relay "default": topic orders is paused since \S+Z by ana \(INC-12\), 3 rows in outbox_dead: to end the pause, run "outbox-relay topics resume orders --relay`, r.stdout)
	assert.Contains(t, r.stdout, `3 rows of paused topics in outbox_dead: "outbox-relay topics resume" publishes them`)
	execSQL(t, conn, "UPDATE effectonce.outbox_dead SET reason = 'refused' WHERE seq = 3")
	r = runOn(t, address, "status", "--interval", "0s")
	assert.Contains(t, r.stdout, `2 rows in outbox_dead, which hold their keys: read the column error and fix the cause; 1 more of paused topics: "outbox-relay topics resume"`)
	assert.Len(t, runOn(t, address, "status", "--interval", "0s", "--json").object(t)["paused_topics"], 2)
}

// Property: a pause whose wait was interrupted is reported as such, and not as one that took too
// long.
func TestPauseIsInterrupted(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	execSQL(t, conn, "INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('default', 1)")
	execSQL(t, conn, "INSERT INTO effectonce.outbox_replicas (relay, owner, alive_until, obeys) VALUES ('default', 'a', 'infinity', '{}')")
	ctx, interrupt := context.WithCancel(t.Context())
	stdout, done := newOutput(), make(chan int, 1)
	go func() {
		done <- main.Execute(ctx, []string{"topics", "pause", "orders", "--force"}, alone(map[string]string{"DATABASE_URL": address}), stdout, newOutput())
	}()
	paused := func() (yes bool) {
		assert.NoError(t, conn.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM effectonce.outbox_paused)").Scan(&yes))
		return yes
	}
	require.Eventually(t, paused, commandMax, 10*time.Millisecond)
	interrupt()
	assert.Equal(t, 1, <-done)
	assert.Contains(t, stdout.String(), "1 of 1 topic paused; the pause was not confirmed before the interruption: rows read before it may still be published")
}
