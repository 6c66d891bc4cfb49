package inspect_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/inspect"
	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: where Kafka has no record at a place it is said why: no such topic, no such partition,
// deleted, not written yet, of an aborted transaction, of one that is open, or the end of a
// transaction.
func TestWhyThereIsNoRecord(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 2)
	producer := kafkatest.Client(t, kgo.TransactionalID(topic), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	produce := func(end *kgo.TransactionEndTry) {
		t.Helper()
		require.NoError(t, producer.BeginTransaction())
		require.NoError(t, producer.ProduceSync(t.Context(), &kgo.Record{Topic: topic, Value: []byte("x")}).FirstErr())
		if end != nil {
			require.NoError(t, producer.EndTransaction(t.Context(), *end))
		}
	}
	commit, abort := kgo.TryCommit, kgo.TryAbort
	produce(&commit) // 0, its end 1
	produce(&abort)  // 2, 3
	produce(&commit) // 4, 5
	kafkatest.Marked(t, topic)
	var offsets kadm.Offsets
	offsets.Add(kadm.Offset{Topic: topic, At: 1})
	deleted, err := kadm.NewClient(kafkatest.Client(t)).DeleteRecords(t.Context(), offsets)
	require.NoError(t, err)
	require.NoError(t, deleted.Error())
	for place, want := range map[string]inspect.PlaceState{
		kafkatest.UnusedTopic(t) + "/0/0": inspect.PlaceNoTopic, topic + "/2/0": inspect.PlaceNoPartition, topic + "/0/0": inspect.PlaceDeleted,
		topic + "/0/1": inspect.PlaceControl, topic + "/0/2": inspect.PlaceAborted, topic + "/0/3": inspect.PlaceControl, topic + "/0/4": inspect.PlaceRecord,
		topic + "/0/6": inspect.PlaceBeyondEnd, topic + "/1/0": inspect.PlaceBeyondEnd,
	} {
		x := explain(t, pool, kafka(t), place)
		require.Empty(t, x.KafkaError, place)
		require.NotNil(t, x.At, place)
		assert.Equal(t, want, x.At.State, place)
		assert.Equal(t, want == inspect.PlaceRecord, len(x.Records) == 1, place)
	}
	produce(nil)                                                       // 6
	limited, cancel := context.WithTimeout(t.Context(), 2*time.Second) // for copies the topic is searched to its end, which is not known yet
	defer cancel()
	open, err := inspect.Explain(limited, pool, kafka(t), inspect.Question{Schema: schema, Text: topic + "/0/6", Since: time.Hour, ScanMax: 1000})
	require.NoError(t, err)
	assert.Equal(t, inspect.PlaceOpen, open.At.State)
	assert.Len(t, open.Records, 1)
	require.NoError(t, producer.EndTransaction(t.Context(), kgo.TryAbort))
	kafkatest.Marked(t, topic)
	x := explain(t, pool, kafka(t), topic+"/0/7")
	assert.Equal(t, inspect.At{Place: inspect.Place{Topic: topic, Offset: 7}, State: inspect.PlaceControl, Partitions: 2, Start: 1, End: 8}, *x.At)
	assert.Nil(t, explain(t, pool, nil, topic+"/0/0").At, "Kafka was not asked")
}

// Property: a message before the position of a group that has no claim of it was handled: its claim
// is forgotten, or there never was one.
func TestWhatWasHandledWithoutAClaim(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	id := scalar[string](t, pool, insertSQL, topic)
	later := scalar[string](t, pool, insertSQL, topic)
	publish(t, pool)
	consume(t, pool, topic, consumer.Each(nothing), "SELECT count(*) = 2 FROM effectonce.processed_messages")
	assert.Empty(t, explain(t, pool, kafka(t), id).Passed, "it has its claim")
	exec(t, pool, "DELETE FROM effectonce.processed_messages")
	exec(t, pool, "UPDATE effectonce.consumer_positions SET next_offset = 1")
	for _, asked := range []string{id, topic + "/0/0"} {
		x := explain(t, pool, kafka(t), asked)
		require.Len(t, x.Passed, 1, asked)
		p := x.Passed[0]
		assert.Equal(t, []any{"g-" + topic, int64(1), topic + "/0/0"}, []any{p.Group, p.Position, p.String()})
		assert.NotNil(t, p.WindowSeconds)
	}
	assert.Len(t, explain(t, pool, nil, topic+"/0/0").Passed, 1, "its place is enough, without Kafka")
	assert.Empty(t, explain(t, pool, kafka(t), later).Passed, "not reached yet")
}

// Property: a topic is searched from a time that an ID has: a random one has none. A message for
// later is looked for in its own topic.
func TestWhereASearchBegins(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	exec(t, pool, "INSERT INTO effectonce.consumers (name, consumer_group, topics) VALUES ('c', 'c', $1)", []string{kafkatest.Topic(t, 1)})
	now := scalar[time.Time](t, pool, "SELECT now()")
	for _, random := range []string{"105e2ec6-3bcb-4b84-9d2a-0f1f8b7c9a10", "12345678-1234-4234-8234-123456789012"} {
		x := explain(t, pool, kafka(t), random)
		require.NotNil(t, x.Searched)
		assert.True(t, x.Searched.Since.Before(now), "%s: %v", random, x.Searched.Since)
		assert.True(t, x.Searched.Since.After(now.AddDate(-1, 0, 0)), "%s: %v", random, x.Searched.Since)
	}
	ahead, err := uuid.NewV7()
	require.NoError(t, err)
	ahead[0] = 0x10 // in the year 2527
	assert.True(t, explain(t, pool, kafka(t), ahead.String()).Searched.Since.Before(now))

	id := scalar[string](t, pool, "INSERT INTO effectonce.outbox_scheduled (topic, key, payload, due_at) VALUES ($1, 'k', 'x', now() + interval '1 hour') RETURNING id::text", topic)
	x := explain(t, pool, kafka(t), id)
	assert.Equal(t, []string{topic}, x.Searched.Topics)
}

// Property: a record that compaction deleted is told apart from one that retention deleted.
func TestCompactedRecords(t *testing.T) {
	t.Parallel()
	fake := kafkatest.Fake(t)
	brokers := fake.ListenAddrs()
	topic := kafkatest.TopicAt(t, brokers, 1, "cleanup.policy", "compact")
	client := kafkatest.ClientAt(t, brokers)
	for _, key := range []string{"a", "b", "b", "b"} {
		require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: topic, Key: []byte(key), Value: []byte("x")}).FirstErr())
	}
	fake.Compact() // the last batch stays as it is
	pool, k := pgtest.Pool(t), &inspect.Kafka{Client: client, Options: []kgo.Opt{kgo.SeedBrokers(brokers...)}}
	for place, want := range map[string]inspect.PlaceState{
		"/0/0": inspect.PlaceRecord, "/0/1": inspect.PlaceCompacted, "/0/2": inspect.PlaceRecord, "/0/3": inspect.PlaceRecord, "/0/4": inspect.PlaceBeyondEnd,
	} {
		x := explain(t, pool, k, topic+place)
		require.NotNil(t, x.At, place)
		assert.Equal(t, want, x.At.State, place)
		assert.Equal(t, want == inspect.PlaceRecord, len(x.Records) == 1, place)
	}
}
