package inspect_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/inspect"
	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/outbox"
)

const insertSQL = `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'order-1', 'body') RETURNING id::text`

// Property: a message is followed all the way: its row waits, is published, is in its partition, is
// claimed, and what its handler published is its child; a record that was sent twice is found
// twice.
func TestExplainFollowsAMessage(t *testing.T) {
	t.Parallel()
	pool, topic, next := pgtest.Pool(t), kafkatest.Topic(t, 3), kafkatest.Topic(t, 1)
	exec(t, pool, insertSQL, topic)
	id := scalar[string](t, pool, insertSQL, topic)

	x := explain(t, pool, kafka(t), id)
	require.Len(t, x.Outbox, 1)
	assert.Empty(t, x.Outbox[0].States, "no relay ran")
	assert.Empty(t, x.Records)
	publish(t, pool)
	later := scalar[string](t, pool, insertSQL, topic)
	assert.Equal(t, inspect.StateWaiting, explain(t, pool, nil, later).Outbox[0].States["default"])

	x = explain(t, pool, kafka(t), id)
	assert.Equal(t, inspect.StatePublished, x.Outbox[0].States["default"])
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
		assert.Equal(t, inspect.StatePublished, x.Children[1].States["default"])
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
	exec(t, pool, `INSERT INTO effectonce.message_attempts SELECT consumer, message_id, 3, 'slow' FROM effectonce.parked_messages`)
	exec(t, pool, `INSERT INTO effectonce.operator_actions (who, what, why, subject)
		SELECT 'ana', 'parked.retry', 'why not', jsonb_build_object('message_id', message_id) FROM effectonce.parked_messages`)
	hash := scalar[string](t, pool, "SELECT effectonce.message_id('shop', 'order-7')::text")
	place := scalar[string](t, pool, `SELECT format('%s/%s/%s', topic, partition, "offset") FROM effectonce.parked_messages WHERE key = 'k'`)
	for _, asked := range []string{"order-7", hash, place} {
		x := explain(t, pool, kafka(t), asked)
		require.Len(t, x.Records, 1, asked)
		assert.Equal(t, place, x.Records[0].String())
		assert.Equal(t, "order-7", x.Records[0].MessageID)
		require.Len(t, x.Parked, 1, asked)
		assert.Equal(t, "permanent", x.Parked[0].Reason)
		assert.Len(t, x.Claims, 1, asked)
		require.Len(t, x.Attempts, 1, asked)
		assert.EqualValues(t, 3, x.Attempts[0].Attempts)
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
	q := inspect.Question{Schema: schema, Text: "4", Topics: []string{topic}, Since: 1 << 40, ScanMax: 4}
	x, err := inspect.Explain(t.Context(), pool, kafka(t), q)
	require.NoError(t, err)
	assert.False(t, x.Searched.Complete)
	assert.Empty(t, x.Records)
	q.ScanMax = 5
	x, err = inspect.Explain(t.Context(), pool, kafka(t), q)
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
	ids[1] = scalar[string](t, pool, insertSQL, "t")
	exec(t, pool, "INSERT INTO effectonce.outbox_ticks (tick, snapshot, seq_last) SELECT 1, pg_current_snapshot(), 2")
	ids[2], ids[3] = scalar[string](t, pool, insertSQL, "t"), scalar[string](t, pool, insertSQL, "t")
	exec(t, pool, "INSERT INTO effectonce.outbox_ticks (tick, snapshot, seq_last) SELECT 2, pg_current_snapshot(), 4")
	exec(t, pool, "INSERT INTO effectonce.outbox_progress (relay, shard) VALUES ('default', 0)")
	exec(t, pool, "INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick, next_tick, seq) VALUES ('default', 0, 1, 0, 1, 2, 3)")
	require.NoError(t, late.Commit(t.Context()))
	ids[4] = scalar[string](t, pool, insertSQL, "t")
	states := func() (all string) {
		for _, id := range ids {
			all += explain(t, pool, nil, id).Outbox[0].States["default"][:1]
		}
		return all
	}
	assert.Equal(t, "wppww", states())
	exec(t, pool, "UPDATE effectonce.outbox_advances SET next_tick = NULL")
	assert.Equal(t, "wpwww", states(), "seq counts only inside a batch")
	exec(t, pool, "UPDATE effectonce.outbox_progress SET system_identifier = 1")
	exec(t, pool, "UPDATE effectonce.outbox_advances SET floor = 1")
	assert.Equal(t, "pwwww", states())
	exec(t, pool, "UPDATE effectonce.outbox_advances SET tick = 77")
	_, err = inspect.Explain(t.Context(), pool, nil, inspect.Question{Schema: schema, Text: ids[0]})
	require.ErrorContains(t, err, "tick")
}
