package trace_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/trace"
	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// looks reads until nothing is behind.
func looks(t *testing.T, tail *trace.Tail, db operator.Querier) (seqs []int64, rows []trace.TailRow) {
	t.Helper()
	for behind := true; behind; {
		var err error
		behind, err = tail.Next(t.Context(), db, func(r trace.TailRow) error {
			seqs, rows = append(seqs, r.Seq), append(rows, r)
			return nil
		})
		require.NoError(t, err)
	}
	return seqs, rows
}

// Property: every row is shown once, also those of a transaction that commits after later ones;
// rows that existed before are shown only from the beginning.
func TestTailShowsEachRowOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	pgtest.Exec(t, pool, "INSERT INTO effectonce.outbox (topic) SELECT 't' FROM generate_series(1, 2500)")
	late, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer late.Rollback(context.WithoutCancel(t.Context()))
	_, err = late.Exec(t.Context(), "INSERT INTO effectonce.outbox (topic) VALUES ('t')")
	require.NoError(t, err)
	pgtest.Exec(t, pool, "INSERT INTO effectonce.outbox (topic) VALUES ('t')")

	now, all := &trace.Tail{Schema: schema}, &trace.Tail{Schema: schema}
	require.NoError(t, now.Start(t.Context(), pool, false))
	require.NoError(t, all.Start(t.Context(), pool, true))
	pgtest.Exec(t, pool, "INSERT INTO effectonce.outbox (topic) VALUES ('t')")
	seqs, _ := looks(t, now, pool)
	assert.Equal(t, []int64{2503}, seqs)
	seqs, _ = looks(t, all, pool)
	require.Len(t, seqs, 2502)
	assert.Equal(t, []int64{2500, 2502, 2503}, seqs[2499:])
	require.NoError(t, late.Commit(t.Context()))
	pgtest.Exec(t, pool, "INSERT INTO effectonce.outbox (topic) VALUES ('t')")
	for _, tail := range []*trace.Tail{now, all} {
		seqs, _ = looks(t, tail, pool)
		assert.Equal(t, []int64{2501, 2504}, seqs)
		seqs, _ = looks(t, tail, pool)
		assert.Empty(t, seqs)
	}
}

// Property: topic and key narrow it, and payloads are read only as far as asked for.
func TestTailFilters(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), "b"
	pgtest.Exec(t, pool, "INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('a', 'k', '12345'), ('b', 'k', '12345'), ('b', NULL, NULL)")
	tail := &trace.Tail{Schema: schema, Topic: &topic}
	require.NoError(t, tail.Start(t.Context(), pool, true))
	seqs, rows := looks(t, tail, pool)
	assert.Equal(t, []int64{2, 3}, seqs)
	assert.Nil(t, rows[0].Payload)
	assert.EqualValues(t, 5, *rows[0].PayloadBytes)
	assert.Nil(t, rows[1].PayloadBytes)
	tail = &trace.Tail{Schema: schema, Key: human.Key("k"), PayloadMax: 3}
	require.NoError(t, tail.Start(t.Context(), pool, true))
	seqs, rows = looks(t, tail, pool)
	assert.Equal(t, []int64{1, 2}, seqs)
	assert.Equal(t, "123", string(rows[0].Payload))
}

// Property: positions show how far relays and consumers are behind, each from what it stores
// itself.
func TestPositionsShowLag(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	pgtest.Exec(t, pool, "INSERT INTO effectonce.outbox (topic) SELECT $1 FROM generate_series(1, 5)", topic)
	publish(t, pool)
	consume(t, pool, topic, consumer.Each(nothing), "SELECT count(*) = 5 FROM effectonce.processed_messages")
	pgtest.Exec(t, pool, "INSERT INTO effectonce.outbox (topic) SELECT $1 FROM generate_series(1, 2)", topic)
	publish(t, pool)
	pgtest.Exec(t, pool, "INSERT INTO effectonce.outbox (topic) SELECT $1 FROM generate_series(1, 3)", topic)
	pgtest.Exec(t, pool, "INSERT INTO effectonce.outbox_progress (relay, shard) VALUES ('new', 0)")
	pgtest.Exec(t, pool, "INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, trouble) VALUES ('none', 'no-such-topic', 0, 'why')")
	k, p, err := kafka(t), (*trace.Positions)(nil), error(nil)
	testwait.True(t, "the consumer was stopped, and has left its group", func() bool {
		p, err = trace.ReadPositions(t.Context(), pool, k, schema, trace.PositionFilter{})
		return err == nil && len(p.Consumers) == 2 && p.Consumers[0].Members != nil && *p.Consumers[0].Members == 0
	})
	require.Len(t, p.Shards, 2)
	served, fresh := p.Shards[0], p.Shards[1]
	assert.Equal(t, []int64{3, 7, 10, 0}, []int64{served.Waiting, served.Published, fresh.Waiting, fresh.Published})
	require.NotNil(t, served.TickAgeSeconds)
	assert.GreaterOrEqual(t, *served.TickAgeSeconds, 0.0)
	assert.Nil(t, fresh.TickAgeSeconds)
	assert.Empty(t, served.Owner, "it was given back")
	at, none := p.Consumers[0], p.Consumers[1]
	assert.Equal(t, "5 7 2", fmt.Sprint(*at.NextOffset, *at.End, *at.Lag))
	assert.True(t, at.Released)
	assert.Nil(t, none.End)
	assert.Equal(t, "why", none.Trouble)

	assert.Zero(t, *at.Deleted)
	var offsets kadm.Offsets
	offsets.Add(kadm.Offset{Topic: topic, At: 6})
	deleted, err := kadm.NewClient(kafkatest.Client(t)).DeleteRecords(t.Context(), offsets)
	require.NoError(t, err)
	require.NoError(t, deleted.Error())
	p, err = trace.ReadPositions(t.Context(), pool, kafka(t), schema, trace.PositionFilter{})
	require.NoError(t, err)
	at = p.Consumers[0]
	assert.Equal(t, "5 6 7 1 1", fmt.Sprint(*at.NextOffset, *at.Start, *at.End, *at.Lag, *at.Deleted), "what is deleted is no lag")

	group, name := "none", "new"
	p, err = trace.ReadPositions(t.Context(), pool, nil, schema, trace.PositionFilter{Group: &group, Relay: &name})
	require.NoError(t, err)
	assert.Len(t, p.Shards, 1)
	assert.Len(t, p.Consumers, 1)
}

// Property: a request to a group coordinator that has just started is retried.
func TestPositionsWaitForTheCoordinator(t *testing.T) {
	t.Parallel()
	pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
	pgtest.Exec(t, pool, "INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, next_offset) VALUES ('billing', 'orders', 0, 0)")
	asked := 0
	fake.ControlKey(int16(kmsg.DescribeGroups), func(request kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		if asked++; asked > 2 {
			return nil, nil, false
		}
		answer := request.ResponseKind().(*kmsg.DescribeGroupsResponse)
		group := kmsg.NewDescribeGroupsResponseGroup()
		group.Group, group.ErrorCode = "billing", kerr.CoordinatorNotAvailable.Code
		answer.Groups = append(answer.Groups, group)
		return answer, nil, true
	})
	client := kafkatest.ClientAt(t, fake.ListenAddrs(), kgo.RequestRetries(0))
	p, err := trace.ReadPositions(t.Context(), pool, &trace.Kafka{Client: client}, schema, trace.PositionFilter{})
	require.NoError(t, err)
	require.Len(t, p.Consumers, 1)
	assert.NotNil(t, p.Consumers[0].Lag)
	assert.Empty(t, p.KafkaError)
	assert.NotNil(t, p.Consumers[0].Members)
}

func TestMain(m *testing.M) { pgtest.Main(m) }

const schema = "effectonce"

func options(t *testing.T) []kgo.Opt {
	t.Helper()
	return []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}
}

func kafka(t *testing.T) *trace.Kafka {
	t.Helper()
	return &trace.Kafka{Client: kafkatest.Client(t), Options: options(t)}
}

// publish lets a relay publish what waits.
func publish(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	r, err := relay.New(pool, options(t), relay.Config{})
	require.NoError(t, err)
	_, err = r.Drain(t.Context())
	require.NoError(t, err)
}

// consume runs a consumer until a condition holds in the database.
func consume(t *testing.T, pool *pgxpool.Pool, topic string, handler consumer.Handler, until string) {
	t.Helper()
	c, err := consumer.New(pool, options(t), handler, consumer.Config{Group: "g-" + topic, Topics: []string{topic}})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	testwait.True(t, until, func() bool { return pgtest.Value[bool](t, pool, until) })
	cancel()
	require.NoError(t, testwait.Chan(t, "the consumer's end", done))
}

func explain(t *testing.T, pool *pgxpool.Pool, k *trace.Kafka, text string) *trace.Explanation {
	t.Helper()
	found, err := trace.Explain(t.Context(), pool, k, trace.Question{Schema: schema, Text: text, Since: time.Hour, ScanMax: 1000})
	require.NoError(t, err)
	return found
}

func nothing(context.Context, pgx.Tx, *consumer.Message) error { return nil }
