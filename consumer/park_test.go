package consumer_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/outbox"
)

var errBad = errors.New("no such account")

// shapes are the three shapes of a handler with the same effect. fails says which messages fail,
// and how.
func shapes(fails func(msg *consumer.Message) error) map[string]consumer.Handler {
	return map[string]consumer.Handler{
		"each": consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			if err := fails(msg); err != nil {
				return err
			}
			return effect(ctx, tx, msg)
		}),
		"queued": consumer.Queued(func(_ context.Context, q *consumer.Queue, msg *consumer.Message) error {
			if err := fails(msg); err != nil {
				return err
			}
			q.Queue(`INSERT INTO effects (message_id, value) VALUES ($1, $2)`, [16]byte(msg.ID), string(msg.Value))
			return nil
		}),
		"batch": consumer.Batch(func(ctx context.Context, tx pgx.Tx, msgs []*consumer.Message) error {
			rows := make([][]any, len(msgs))
			for i, msg := range msgs {
				if err := fails(msg); err != nil {
					return err // does not name the message: found by halving
				}
				rows[i] = []any{[16]byte(msg.ID), string(msg.Value)}
			}
			_, err := tx.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"message_id", "value"}, pgx.CopyFromRows(rows))
			return err
		}),
	}
}

// Property: a message that cannot be handled is parked with the reason, in the transaction that
// claims it; later messages of its key wait behind it and all others continue; after a retry, it
// and the waiting messages have their effects in order. For each shape of handler. Rows C15, C17 of
// guarantees.md.
func TestParkingKeepsOrder(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"each", "queued", "batch"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var repaired atomic.Bool
			handler := shapes(func(msg *consumer.Message) error {
				if strings.HasSuffix(string(msg.Value), "bad") && !repaired.Load() {
					return consumer.Permanent(errBad)
				}
				return nil
			})[name]
			h := newHarness(t, 1)
			h.produceKeyed("a:1", "b:1", "a:bad", "b:2", "a:2", "c:bad", "b:3", "a:3")
			stop := h.run(handler, nil)
			h.waitHandled(8)
			require.Equal(t, []string{"a:1", "b:1", "b:2", "b:3"}, h.values())
			require.Equal(t, []string{"a:bad permanent parked", "a:2 behind behind", "c:bad permanent parked", "a:3 behind behind"}, h.parked())
			require.Equal(t, 8, h.number(`SELECT count(*) FROM effectonce.processed_messages`), "claimed")
			require.Equal(t, 2, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE error = 'no such account' AND attempts = 1`))

			// It fails again, and stays where it is.
			h.retry()
			h.wait("failed again", func() bool {
				return h.logged("message cannot be handled and is parked") == 4
			})
			h.produceKeyed("a:4", "c:2")
			h.waitHandled(10)
			require.Len(t, h.values(), 4)

			// A retry of one key releases what is behind it, and no message of another key.
			repaired.Store(true)
			h.exec(`UPDATE effectonce.parked_messages SET state = 'retry', retry_at = clock_timestamp() WHERE payload = 'a:bad'`)
			h.waitEffects(8)
			h.wait("one key is free", func() bool { return len(h.parked()) == 2 })
			require.Equal(t, []string{"c:bad permanent parked", "c:2 behind behind"}, h.parked())
			h.retry()
			h.waitEffects(10)
			h.wait("nothing is parked", func() bool { return len(h.parked()) == 0 })
			order := strings.Join(h.values()[4:], " ")
			require.Equal(t, []string{"a:bad", "a:2", "a:3", "a:4"}, of("a", order))
			require.Equal(t, []string{"c:bad", "c:2"}, of("c", order))
			// The key is free again.
			h.produceKeyed("a:5")
			h.untilEffects(11, stop)
		})
	}
}

// of picks the values of a key.
func of(key, values string) (found []string) {
	for _, value := range strings.Fields(values) {
		if strings.HasPrefix(value, key+":") {
			found = append(found, value)
		}
	}
	return found
}

// Property: while a message is parked, its duplicates are dropped as always, and a restarted
// consumer knows which keys wait.
func TestParkedMessagesOutliveTheConsumer(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	bad := failing(&atomic.Bool{})
	h.produceKeyed("a:bad")
	stop := h.run(bad, nil)
	h.waitParked("permanent")
	require.NoError(t, stop())
	h.produceKeyed("a:1", "b:1")
	stop = h.run(bad, nil)
	h.waitEffects(1)
	h.untilHandled(3, stop)
	// A redelivery of everything changes nothing.
	h.exec(`UPDATE effectonce.consumer_positions SET next_offset = 0`)
	h.untilHandled(3, h.run(bad, nil))
	require.Equal(t, []string{"b:1"}, h.values())
	require.Equal(t, []string{"a:bad permanent parked", "a:1 behind behind"}, h.parked())
}

// Property: after a temporary failure a message is tried AttemptsMax times, counted across
// restarts, and then parked.
func TestAttemptsSurviveARestart(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceKeyed("a:bad", "b:1")
	var tried atomic.Int64
	handler := consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if string(msg.Value) == "a:bad" {
			tried.Add(1)
			return errBad
		}
		return effect(ctx, tx, msg)
	})
	settings := func(c *consumer.Config) { c.AttemptsMax, c.RetryMin, c.RetryMax = 5, time.Hour, time.Hour }
	stop := h.run(handler, settings)
	h.waitEffects(1)
	h.waitNumber(1, `SELECT count(*) FROM effectonce.parked_messages WHERE state = 'retry' AND attempts = 1 AND retry_at > now() + interval '20 min'`)
	require.NoError(t, stop())
	stop = h.run(handler, settings)
	for range 4 {
		tries := tried.Load()
		h.wait("tried again", func() bool {
			h.exec(`UPDATE effectonce.parked_messages SET retry_at = now() WHERE state = 'retry'`)
			return tried.Load() > tries
		})
	}
	h.waitNumber(1, `SELECT count(*) FROM effectonce.parked_messages WHERE state = 'parked' AND reason = 'failed' AND attempts = 5`)
	require.NoError(t, stop())
	require.EqualValues(t, 5, tried.Load())
}

// Property: a message that is older than the forgotten claims, by its ID or by its record, is
// parked and not run; a consumer that never forgets runs it.
func TestOlderThanWhatWasForgottenIsExpired(t *testing.T) {
	t.Parallel()
	bothModes(t, "forever", func(t *testing.T, forever bool) {
		t.Helper()
		h := newHarness(t, 1)
		settings := func(c *consumer.Config) { c.Forever = forever }
		stop := h.run(consumer.Each(effect), settings)
		h.wait("the name", func() bool { return h.number(`SELECT count(*) FROM effectonce.consumers`) == 1 })
		require.NoError(t, stop())
		h.exec(`UPDATE effectonce.consumers SET forgotten_to = clock_timestamp() - interval '1 hour' WHERE dedup_window IS NOT NULL`)
		old := time.Now().Add(-2 * time.Hour)
		id := func(at time.Time) []kgo.RecordHeader {
			return []kgo.RecordHeader{{Key: "message-id", Value: []byte(dedup.PublishID("p", uuid.New(), "id", at).String())}}
		}
		h.produceRecords(&kgo.Record{Value: []byte("old id"), Headers: id(old)})
		h.produceRecords(&kgo.Record{Value: []byte("old record"), Timestamp: old, Headers: id(time.Now())})
		h.produceRecords(&kgo.Record{Value: []byte("old, no time in the id"), Timestamp: old, Headers: headers("message-id=x")})
		h.produceRecords(&kgo.Record{Value: []byte("young"), Headers: id(time.Now())})
		h.untilHandled(4, h.run(consumer.Each(effect), settings))
		if forever {
			require.Len(t, h.values(), 4)
			return
		}
		require.Equal(t, []string{"young"}, h.values())
		require.Equal(t, []string{"old id expired parked", "old record expired parked", "old, no time in the id expired parked"}, h.parked())
	})
}

// Property: a message that is too large is parked by reference, and its key waits.
func TestTooLargeIsParkedByReference(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceKeyed("a:"+strings.Repeat("x", 5000), "a:1", "b:1")
	h.untilHandled(3, h.run(consumer.Each(effect), func(c *consumer.Config) { c.MessageBytesMax = 4096 }))
	require.Equal(t, []string{"b:1"}, h.values())
	require.Equal(t, []string{" too_large parked", "a:1 behind behind"}, h.parked())
	// A message without its stored payload cannot be retried, by any statement.
	h.retry()
	stop := h.run(consumer.Each(effect), nil)
	h.waitNumber(1, `SELECT count(*) FROM effectonce.parked_messages WHERE state = 'parked'`)
	require.NoError(t, stop())
	require.Equal(t, []string{"b:1"}, h.values())
}

// Property: with the policy Block nothing is parked: the partition waits, stores the reason in the
// database, and continues when the handler is fixed.
func TestBlockWaitsAndSaysWhy(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceKeyed("a:1", "a:bad", "b:1")
	var repaired atomic.Bool
	stop := h.run(failing(&repaired), func(c *consumer.Config) { block(c); c.AttemptsMax = 2 })
	trouble := `SELECT count(*) FROM effectonce.consumer_positions WHERE trouble LIKE '%blocks its partition%no such account%'`
	h.wait("trouble", func() bool { return h.number(trouble) == 1 })
	h.waitNumber(1, `SELECT count(*) FROM effectonce.consumer_positions WHERE trouble ~ ', attempt ([4-9]|[0-9]{2,}):'`)
	require.Equal(t, []string{"a:1"}, h.values())
	repaired.Store(true)
	h.untilEffects(3, stop)
	require.Equal(t, []string{"a:1", "a:bad", "b:1"}, h.values())
	require.Zero(t, h.number(trouble))
}

// Property: when too many messages fail the partition pauses instead of parking the topic, reports
// that, and continues by itself when the outage is over; nothing is parked beyond the configured
// share.
func TestFloodOfFailuresPausesThePartition(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	for i := range 40 {
		h.produceKeyed(fmt.Sprintf("k%d:bad", i))
	}
	var over atomic.Bool
	c, stop := h.start(failing(&over), func(c *consumer.Config) { c.ParkShareMax = 0.1 })
	require.Contains(t, h.waitState(c, consumer.StatePausedByBreaker).Err, errBad.Error())
	h.waitNumber(1, `SELECT count(*) FROM effectonce.consumer_positions WHERE trouble LIKE '%pauses instead of parking%'`)
	require.Len(t, h.parked(), 10)
	over.Store(true)
	h.waitEffects(30)
	require.Empty(t, h.waitState(c, consumer.StateRunning).Err)
	require.NoError(t, stop())
	require.Len(t, h.parked(), 10)
}

// Property: a dead letter is published once, with its claim, under a derived ID and the headers
// that Spring Kafka's dead letters have; its key continues.
func TestDeadLetterGoesThroughTheOutbox(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceKeyed("a:bad", "a:1")
	handler := failingWith(consumer.Permanent(errors.New("no such account\nat line 1")), &atomic.Bool{})
	stop := h.run(handler, func(c *consumer.Config) { c.OnFailure, c.DeadLetterTopic = consumer.OnFailureDeadLetter, "letters" })
	h.waitEffects(1)
	h.untilHandled(2, stop)
	require.Empty(t, h.parked())
	var topic, key, payload string
	var stored []byte
	require.NoError(t, h.pool.QueryRow(t.Context(), `SELECT topic, convert_from(key, 'UTF8'), convert_from(payload, 'UTF8'), headers::text FROM effectonce.outbox`).
		Scan(&topic, &key, &payload, &stored))
	require.Equal(t, []string{"letters", "a", "a:bad"}, []string{topic, key, payload})
	headers, err := outbox.DecodeHeaders(stored)
	require.NoError(t, err)
	found := map[string][]byte{}
	for _, header := range headers {
		found[header.Name] = header.Value
	}
	require.Equal(t, h.topic, string(found["kafka_dlt-original-topic"]))
	require.Equal(t, h.topic, string(found["kafka_dlt-original-consumer-group"]))
	require.Equal(t, uint32(0), binary.BigEndian.Uint32(found["kafka_dlt-original-partition"]))
	require.Equal(t, uint64(0), binary.BigEndian.Uint64(found["kafka_dlt-original-offset"]))
	require.InDelta(t, time.Now().UnixMilli(), int64(binary.BigEndian.Uint64(found["kafka_dlt-original-timestamp"])), 600_000)
	require.Equal(t, "CreateTime", string(found["kafka_dlt-original-timestamp-type"]))
	require.Equal(t, "effectonce.permanent", string(found["kafka_dlt-exception-fqcn"]))
	require.Equal(t, "no such account", string(found["kafka_dlt-exception-message"]))
	require.Equal(t, "at line 1", string(found["kafka_dlt-exception-stacktrace"]))
	require.NotContains(t, found, "message-id")
}

// Property: another message under an ID is parked as a conflict, whatever named the ID; a true
// duplicate is dropped. It is claimed under its coordinates: a redelivery after its retry has no second
// effect, and the calls of its handler have keys of their own. Row C23 of guarantees.md.
func TestAnotherMessageUnderAnIDIsAConflict(t *testing.T) {
	t.Parallel()
	type testCase struct {
		change func(c *consumer.Config)
		header string
	}
	each(t, map[string]testCase{
		"message-id": {func(*consumer.Config) {}, "message-id=1"},
		"ce_id":      {func(c *consumer.Config) { c.Forever = true }, "ce_id=1"},
		"profile":    {func(c *consumer.Config) { c.IDProfiles = []consumer.IDProfile{consumer.ProfileDebezium} }, "id=1"},
		"header":     {func(c *consumer.Config) { c.IDHeaders = []string{"x-id"} }, "x-id=1"},
		"function":   {func(c *consumer.Config) { c.IDFunc = func(*consumer.Message) []byte { return []byte("1") } }, "nothing=1"},
	}, func(t *testing.T, h *harness, _ string, tc testCase) {
		t.Helper()
		var calls sync.Map
		handler := consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			calls.Store(msg.CallKey("charge"), true)
			return effect(ctx, tx, msg)
		})
		h.produceWith(headers(tc.header), "first", "other", "first", "late")
		h.untilHandled(4, h.run(handler, tc.change))
		require.Equal(t, []string{"first"}, h.values())
		require.Equal(t, []string{"other conflict parked", "late conflict parked"}, h.parked())

		h.retry()
		h.untilEffects(3, h.run(handler, tc.change))
		h.rewind(0, "")
		h.produceWith(headers(tc.header), "later")
		stop := h.run(handler, tc.change)
		h.waitParked("conflict")
		h.untilHandled(5, stop)
		require.ElementsMatch(t, []string{"first", "other", "late"}, h.values(), "nothing twice")
		require.Equal(t, []string{"later conflict parked"}, h.parked())
		keys := 0
		calls.Range(func(any, any) bool { keys++; return true })
		require.Equal(t, 3, keys)
	})
}

// Property: with OnConflictDrop a conflict is dropped, counted and logged.
func TestConflictsAreDroppedWhereThatIsConfigured(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceWith(headers("message-id=1"), "first", "other", "first")
	var conflicts, duplicates atomic.Int64
	h.untilHandled(3, h.run(consumer.Each(effect), func(c *consumer.Config) {
		c.OnConflict = consumer.OnConflictDrop
		c.Hooks.Processed = func(p consumer.Processed) {
			conflicts.Add(int64(p.Conflicts))
			duplicates.Add(int64(p.Duplicates))
		}
	}))
	require.Equal(t, []string{"first"}, h.values())
	require.Empty(t, h.parked())
	require.Equal(t, []int64{1, 1}, []int64{conflicts.Load(), duplicates.Load()})
	require.Equal(t, 1, h.logged("messages are dropped whose ID another message has"), h.log)
}

// Property: if the position stops redeliveries, a rewound offset and a restart change nothing, and
// no row is written for a message.
func TestByPositionStopsRedeliveries(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceAs("1", "first")
	h.produceAs("1", "same id, another offset")
	h.untilEffects(2, h.run(consumer.Each(effect), byPosition))
	h.rewind(0, "")
	h.produceAs("2", "second")
	h.untilEffects(3, h.run(consumer.Each(effect), byPosition))
	require.Zero(t, h.number(`SELECT count(*) FROM effectonce.processed_messages`))
}
