package trace_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/keys"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/trace"
	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/outbox"
)

const insertSQL = `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'order-1', 'body') RETURNING id::text`

// Property: a message is followed all the way: its row waits, is published, is in its partition, is
// claimed, and what its handler published is its child; a record that was sent twice is found
// twice.
func TestExplainFollowsAMessage(t *testing.T) {
	t.Parallel()
	pool, topic, next := pgtest.Pool(t), kafkatest.Topic(t, 3), kafkatest.Topic(t, 1)
	pgtest.Exec(t, pool, insertSQL, topic)
	id := pgtest.Value[string](t, pool, insertSQL, topic)

	x := explain(t, pool, kafka(t), id)
	require.Len(t, x.Outbox, 1)
	assert.Empty(t, x.Outbox[0].States, "no relay ran")
	assert.Empty(t, x.Records)
	publish(t, pool)
	later := pgtest.Value[string](t, pool, insertSQL, topic)
	assert.Equal(t, trace.StateWaiting, explain(t, pool, nil, later).Outbox[0].States["default"])

	x = explain(t, pool, kafka(t), id)
	assert.Equal(t, trace.StatePublished, x.Outbox[0].States["default"])
	require.Len(t, x.Records, 1)
	assert.Equal(t, topic, x.Records[0].Topic)
	assert.Equal(t, "order-1", x.Records[0].Key.String())
	assert.True(t, x.Searched.Complete)
	assert.Empty(t, x.Claims)

	consume(t, pool, topic, consumer.Each(func(ctx context.Context, tx pgx.Tx, _ *consumer.Message) error {
		return outbox.Publish(ctx, tx, outbox.Message{Topic: next}, outbox.Message{Topic: next, Payload: []byte("2")})
	}), "SELECT count(*) = 2 FROM effectonce.processed_messages")
	kafkatest.Client(t).ProduceSync(t.Context(), &kgo.Record{Topic: topic, Key: []byte("order-1"), Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte(id)}}})
	publish(t, pool)
	for _, asked := range []string{id, x.Records[0].String()} {
		x = explain(t, pool, kafka(t), asked)
		assert.Equal(t, []uuid.UUID{uuid.MustParse(id)}, x.IDs)
		assert.Len(t, x.Outbox, 1)
		assert.Len(t, x.Records, 2)
		require.Len(t, x.Claims, 1)
		assert.Equal(t, "g-"+topic, x.Claims[0].Group)
		require.Len(t, x.Children, 2)
		assert.Equal(t, next, x.Children[0].Topic)
		assert.Nil(t, x.Children[0].PayloadBytes)
		assert.Equal(t, trace.StatePublished, x.Children[1].States["default"])
	}
}

// Property: a message of another producer is found by the text that it carries, by the ID in the
// logs, and by its place, and so is what became of it: attempts, parked, operators.
func TestExplainFindsForeignMessages(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 2)
	require.NoError(t, kafkatest.Client(t).ProduceSync(t.Context(),
		&kgo.Record{Topic: topic, Key: []byte("k"), Headers: []kgo.RecordHeader{{Key: "ce_source", Value: []byte("shop")}, {Key: "ce_id", Value: []byte("order-7")}}},
		&kgo.Record{Topic: topic, Key: []byte("other"), Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte("8")}}},
	).FirstErr())
	consume(t, pool, topic, consumer.Each(func(context.Context, pgx.Tx, *consumer.Message) error {
		return consumer.Permanent(errors.New("no such account"))
	}), "SELECT count(*) = 2 FROM effectonce.parked_messages")
	pgtest.Exec(t, pool, `INSERT INTO effectonce.operator_actions (who, what, why, subject)
		SELECT 'ana', 'parked.retry', 'why not', jsonb_build_object('message_id', message_id) FROM effectonce.parked_messages`)
	hash := pgtest.Value[string](t, pool, "SELECT effectonce.message_id('shop', 'order-7')::text")
	place := pgtest.Value[string](t, pool, `SELECT format('%s/%s/%s', topic, partition, "offset") FROM effectonce.parked_messages WHERE key = 'k'`)
	for _, asked := range []string{"order-7", hash, place} {
		x := explain(t, pool, kafka(t), asked)
		require.Len(t, x.Records, 1, asked)
		assert.Equal(t, place, x.Records[0].String())
		assert.Equal(t, "order-7", x.Records[0].MessageID)
		require.Len(t, x.Parked, 1, asked)
		assert.Equal(t, "permanent", x.Parked[0].Reason)
		assert.Len(t, x.Claims, 1, asked)
		require.Len(t, x.Actions, 1, asked)
		assert.Equal(t, "ana", *x.Actions[0].Stated)
		assert.Empty(t, x.Outbox)
	}
	assert.Len(t, explain(t, pool, nil, place).Parked, 1, "its place is enough, without Kafka")
	assert.Len(t, explain(t, pool, nil, "8").Parked, 1)
	for _, asked := range []string{"order-9", uuid.NewString(), topic + "/0/99", topic + "/7/0", "no-such-topic/0/0"} {
		x := explain(t, pool, kafka(t), asked)
		assert.False(t, x.Known, "%s: %+v", asked, x)
	}
}

// Property: the search of a topic is bounded, and says that it stopped.
func TestExplainStopsAtScanMax(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	for i := range 5 {
		require.NoError(t, kafkatest.Client(t).ProduceSync(t.Context(), &kgo.Record{Topic: topic, Headers: []kgo.RecordHeader{{Key: "id", Value: fmt.Append(nil, i)}}}).FirstErr())
	}
	q := trace.Question{Schema: schema, Text: "4", Topics: []string{topic}, Since: 1 << 40, ScanMax: 4}
	x, err := trace.Explain(t.Context(), pool, kafka(t), q)
	require.NoError(t, err)
	assert.False(t, x.Searched.Complete)
	assert.Empty(t, x.Records)
	q.ScanMax = 5
	x, err = trace.Explain(t.Context(), pool, kafka(t), q)
	require.NoError(t, err)
	assert.True(t, x.Searched.Complete)
	assert.Len(t, x.Records, 1)
}

// Property: whether a row is published is decided by the progress of its relay exactly: late
// commits of earlier rows wait, the part of a batch that is done is published, and the floor holds
// after a move to another cluster.
func TestCutDecidesWhatIsPublished(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	late, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer late.Rollback(context.WithoutCancel(t.Context()))
	ids := make([]string, 5)
	require.NoError(t, late.QueryRow(t.Context(), insertSQL, "t").Scan(&ids[0]))
	ids[1] = pgtest.Value[string](t, pool, insertSQL, "t")
	pgtest.Exec(t, pool, "INSERT INTO effectonce.outbox_ticks (tick, snapshot, seq_last) SELECT 1, pg_current_snapshot(), 2")
	ids[2], ids[3] = pgtest.Value[string](t, pool, insertSQL, "t"), pgtest.Value[string](t, pool, insertSQL, "t")
	pgtest.Exec(t, pool, "INSERT INTO effectonce.outbox_ticks (tick, snapshot, seq_last) SELECT 2, pg_current_snapshot(), 4")
	pgtest.Exec(t, pool, "INSERT INTO effectonce.outbox_progress (relay, shard) VALUES ('default', 0)")
	pgtest.Exec(t, pool, "INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick, next_tick, seq) VALUES ('default', 0, 1, 0, 1, 2, 3)")
	require.NoError(t, late.Commit(t.Context()))
	ids[4] = pgtest.Value[string](t, pool, insertSQL, "t")
	states := func() (all string) {
		for _, id := range ids {
			all += explain(t, pool, nil, id).Outbox[0].States["default"][:1]
		}
		return all
	}
	assert.Equal(t, "wppww", states())
	pgtest.Exec(t, pool, "UPDATE effectonce.outbox_advances SET next_tick = NULL")
	assert.Equal(t, "wpwww", states(), "seq counts only inside a batch")
	pgtest.Exec(t, pool, "UPDATE effectonce.outbox_progress SET system_identifier = 1")
	pgtest.Exec(t, pool, "UPDATE effectonce.outbox_advances SET floor = 1")
	assert.Equal(t, "pwwww", states())
	pgtest.Exec(t, pool, "UPDATE effectonce.outbox_advances SET tick = 77")
	_, err = trace.Explain(t.Context(), pool, nil, trace.Question{Schema: schema, Text: ids[0]})
	require.ErrorContains(t, err, "tick")
}

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
	marked(t, topic)
	var offsets kadm.Offsets
	offsets.Add(kadm.Offset{Topic: topic, At: 1})
	deleted, err := kadm.NewClient(kafkatest.Client(t)).DeleteRecords(t.Context(), offsets)
	require.NoError(t, err)
	require.NoError(t, deleted.Error())
	for place, want := range map[string]string{
		kafkatest.UnusedTopic(t) + "/0/0": "no_topic", topic + "/2/0": "no_partition", topic + "/0/0": "deleted",
		topic + "/0/1": "control", topic + "/0/2": "aborted", topic + "/0/3": "control", topic + "/0/4": "record",
		topic + "/0/6": "beyond_end", topic + "/1/0": "beyond_end",
	} {
		x := explain(t, pool, kafka(t), place)
		require.Empty(t, x.KafkaError, place)
		require.NotNil(t, x.At, place)
		assert.Equal(t, want, x.At.State, place)
		assert.Equal(t, want == "record", len(x.Records) == 1, place)
	}
	produce(nil)                                                       // 6
	limited, cancel := context.WithTimeout(t.Context(), 2*time.Second) // for copies the topic is searched to its end, which is not known yet
	defer cancel()
	open, err := trace.Explain(limited, pool, kafka(t), trace.Question{Schema: schema, Text: topic + "/0/6", Since: time.Hour, ScanMax: 1000})
	require.NoError(t, err)
	assert.Equal(t, "open", open.At.State)
	assert.Len(t, open.Records, 1)
	require.NoError(t, producer.EndTransaction(t.Context(), kgo.TryAbort))
	marked(t, topic)
	x := explain(t, pool, kafka(t), topic+"/0/7")
	assert.Equal(t, []any{"control", 2, int64(1), int64(8)}, []any{x.At.State, x.At.Partitions, x.At.Start, x.At.End})
	assert.Nil(t, explain(t, pool, nil, topic+"/0/0").At, "Kafka was not asked")
}

// Property: a message before the position of a group that has no claim of it was handled: its claim
// is forgotten, or there never was one.
func TestWhatWasHandledWithoutAClaim(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	id := pgtest.Value[string](t, pool, insertSQL, topic)
	later := pgtest.Value[string](t, pool, insertSQL, topic)
	publish(t, pool)
	consume(t, pool, topic, consumer.Each(nothing), "SELECT count(*) = 2 FROM effectonce.processed_messages")
	assert.Empty(t, explain(t, pool, kafka(t), id).Passed, "it has its claim")
	pgtest.Exec(t, pool, "DELETE FROM effectonce.processed_messages")
	pgtest.Exec(t, pool, "UPDATE effectonce.consumer_positions SET next_offset = 1")
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
	pgtest.Exec(t, pool, "INSERT INTO effectonce.consumers (name, consumer_group, topics) VALUES ('c', 'c', $1)", []string{kafkatest.Topic(t, 1)})
	now := pgtest.Value[time.Time](t, pool, "SELECT now()")
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

	id := pgtest.Value[string](t, pool, "INSERT INTO effectonce.outbox_scheduled (topic, key, payload, due_at) VALUES ($1, 'k', 'x', now() + interval '1 hour') RETURNING id::text", topic)
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
	pool, k := pgtest.Pool(t), &trace.Kafka{Client: client, Options: []kgo.Opt{kgo.SeedBrokers(brokers...)}}
	for place, want := range map[string]string{
		"/0/0": "record", "/0/1": "compacted", "/0/2": "record", "/0/3": "record", "/0/4": "beyond_end",
	} {
		x := explain(t, pool, k, topic+place)
		require.NotNil(t, x.At, place)
		assert.Equal(t, want, x.At.State, place)
		assert.Equal(t, want == "record", len(x.Records) == 1, place)
	}
}

// Property: a request is followed from its key to the row that it published, the record and the
// claim, and what operators did.
func TestExplainFollowsARequest(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	charge, err := idempotency.New(pool, idempotency.Config{Operation: "charge"})
	require.NoError(t, err)
	flow, err := idempotency.NewFlow(charge, idempotency.FlowConfig[struct{}]{},
		idempotency.Phase[struct{}]{Name: "reserve", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[struct{}]) error {
			return outbox.Publish(ctx, tx, outbox.Message{ID: step.ChildID(), Topic: topic})
		}},
		idempotency.Phase[struct{}]{Name: "pay", AtMostOnce: true, Call: func(context.Context, *idempotency.Step[struct{}]) error {
			return errors.New("no answer")
		}})
	require.NoError(t, err)
	key := idempotency.Key{Scope: "t7", Operation: "charge", Value: "two-4127"}
	_, err = flow.Do(t.Context(), key, nil)
	require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	_, err = keys.Retry(t.Context(), pool, "effectonce", operator.By{Who: "ana", Why: "w"}, keys.Place{Scope: "t7", Operation: "charge", Key: "two-4127"}, keys.CallDidNotHappen)
	require.NoError(t, err)
	publish(t, pool)
	consume(t, pool, topic, consumer.Each(nothing), "SELECT count(*) = 1 FROM effectonce.processed_messages")

	id := key.ChildID("reserve")
	x := explain(t, pool, kafka(t), key.Value)
	require.Len(t, x.Requests, 1)
	assert.Equal(t, []string{key.Value, keys.Running}, []string{x.Requests[0].Key, x.Requests[0].State})
	require.Len(t, x.Outbox, 1)
	assert.Equal(t, id, x.Outbox[0].ID)
	assert.Equal(t, trace.StatePublished, x.Outbox[0].States["default"])
	require.Len(t, x.Records, 1)
	assert.Equal(t, id.String(), x.Records[0].MessageID)
	assert.Len(t, x.Claims, 1)
	assert.Len(t, x.Actions, 1)
}

// marked waits until brokers have marked the end of each transaction in a topic, which they acknowledge
// before. No transaction may be open.
func marked(t *testing.T, topic string) {
	t.Helper()
	admin := kadm.NewClient(kafkatest.Client(t))
	testwait.True(t, "transactions are marked", func() bool {
		ends, err := admin.ListEndOffsets(t.Context(), topic)
		require.NoError(t, err)
		committed, err := admin.ListCommittedOffsets(t.Context(), topic)
		require.NoError(t, err)
		all := ends.Error() == nil && committed.Error() == nil
		ends.Each(func(end kadm.ListedOffset) {
			c, ok := committed.Lookup(topic, end.Partition)
			all = all && ok && c.Offset >= end.Offset
		})
		return all
	})
}
