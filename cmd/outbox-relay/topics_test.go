package main_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"

	main "github.com/effectonce/effectonce/cmd/outbox-relay"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// Property: a topic that neither exists nor has rows is not paused, unless that is forced; rows
// that wait anywhere are enough, and so is Kafka's word.
func TestPauseOfAnUnknownTopicIsRefused(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	execSQL(t, conn, burySQL)
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ('in-outbox')")
	execSQL(t, conn, "INSERT INTO effectonce.outbox_scheduled (due_at, topic) VALUES ('2999-01-01', 'in-scheduled')")
	r := runOn(t, address, "topics", "pause", "in-outbox", "misspelt", "--wait", "0s")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stderr, "topic misspelt has no rows; with --brokers Kafka is asked whether it exists: nothing was paused; --force pauses it anyway")
	assert.Contains(t, runOn(t, address, "topics", "pause", "in-outbox", "in-scheduled", "orders", "--wait", "0s").stdout, "3 of 3 topics paused")
	assert.Contains(t, runKafka(t, address, "topics", "pause", kafkatest.Topic(t, 1), "--wait", "0s").stdout, "1 of 1 topic paused")
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
	testwait.True(t, "the pause is stored", paused)
	interrupt()
	assert.Equal(t, 1, testwait.Chan(t, "the command's end", done))
	assert.Contains(t, stdout.String(), "1 of 1 topic paused; the pause was not confirmed before the interruption: rows read before it may still be published")
}
