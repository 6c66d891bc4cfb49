package checker_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/demo/checker"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// tables are those of the demo, as far as the checker reads them.
const tables = `
CREATE SCHEMA "the shop";
SET search_path = "the shop";
CREATE TABLE orders (id bigint, message_id uuid, customer text, version bigint, amount bigint);
CREATE TABLE effects (sequence bigint GENERATED ALWAYS AS IDENTITY, order_id bigint, message_id uuid, customer text, version bigint, amount bigint);
CREATE TABLE balances (customer text, balance bigint);
INSERT INTO orders SELECT n, lpad(n::text, 32, '0')::uuid, 'customer-' || n % 3, n / 3 + 1, 10 * n FROM generate_series(0, 29) AS n;
INSERT INTO effects (order_id, message_id, customer, version, amount) SELECT id, message_id, customer, version, amount FROM orders ORDER BY id;
INSERT INTO balances SELECT customer, sum(amount) FROM orders GROUP BY customer;`

func connect(t *testing.T) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), pgtest.EmptyDatabase(t))
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, conn.Close(context.WithoutCancel(t.Context()))) })
	return conn
}

// What is planted into the database is found there.
func TestReadDatabaseSeesPlantedBugs(t *testing.T) {
	t.Parallel()
	cases := []struct {
		bug, plant string
		want       checker.Verdict
	}{
		{"none", ``, checker.Verdict{}},
		{"lost", `DELETE FROM effects WHERE order_id = 7`, checker.Verdict{Lost: 1}},
		{"doubled", `INSERT INTO effects (order_id, message_id, customer, version, amount) SELECT order_id, message_id, customer, version, amount FROM effects WHERE order_id IN (3, 4)`, checker.Verdict{Doubled: 2}},
		{"versions swapped", `UPDATE effects SET version = 3 - version WHERE order_id IN (0, 3)`, checker.Verdict{OutOfOrder: 1, Phantoms: 2}},
		{"phantom", `DELETE FROM orders WHERE id = 29`, checker.Verdict{Phantoms: 1, WrongBalances: 1}},
		{"balance", `UPDATE balances SET balance = balance - 1 WHERE customer = 'customer-2'`, checker.Verdict{WrongBalances: 1}},
	}
	for _, c := range cases {
		t.Run(c.bug, func(t *testing.T) {
			t.Parallel()
			conn := connect(t)
			_, err := conn.Exec(t.Context(), tables+c.plant)
			require.NoError(t, err)
			var evidence checker.Evidence
			require.NoError(t, checker.ReadDatabase(t.Context(), conn, "the shop", &evidence))
			got := checker.Judge(evidence)
			assert.Equal(t, c.want, checker.Verdict{
				Lost: got.Lost, Doubled: got.Doubled, OutOfOrder: got.OutOfOrder, Phantoms: got.Phantoms, WrongBalances: got.WrongBalances,
			}, "%v", got.Examples)
		})
	}
}

// A schema that is not there is an error, not a run without orders.
func TestReadDatabaseWithoutTables(t *testing.T) {
	t.Parallel()
	require.ErrorContains(t, checker.ReadDatabase(t.Context(), connect(t), "shop", &checker.Evidence{}), "read the orders")
}

func record(topic string, partition int32, id, key, value string) *kgo.Record {
	r := &kgo.Record{Topic: topic, Partition: partition, Key: []byte(key), Value: []byte(value)}
	if id != "" {
		r.Headers = []kgo.RecordHeader{{Key: "message-id", Value: []byte(id)}}
	}
	return r
}

// Every committed record is read once with its place, what was aborted is not there, and what is no
// event of an order says why.
func TestReadTopicReadsEverythingThatIsCommitted(t *testing.T) {
	t.Parallel()
	topic := kafkatest.Topic(t, 3) // partition 2 stays empty
	ctx := t.Context()
	plain := kafkatest.Client(t, kgo.RecordPartitioner(kgo.ManualPartitioner()))
	const body = `{"order":%d,"customer":"a","version":%d,"amount":5}`
	require.NoError(t, plain.ProduceSync(ctx,
		record(topic, 0, "m1", "a", fmt.Sprintf(body, 1, 1)),
		record(topic, 0, "m1", "a", fmt.Sprintf(body, 1, 1)),
		record(topic, 1, "m2", "a", `no JSON`),
		record(topic, 1, "", "a", fmt.Sprintf(body, 2, 2)),
		record(topic, 1, "m4", "a", `{}`),
		record(topic, 1, "m5", "b", fmt.Sprintf(body, 5, 5)),
	).FirstErr())
	transactional := kafkatest.Client(t, kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.TransactionalID(topic))
	for _, end := range []kgo.TransactionEndTry{kgo.TryCommit, kgo.TryAbort} {
		require.NoError(t, transactional.BeginTransaction())
		require.NoError(t, transactional.ProduceSync(ctx, record(topic, 0, "m6", "a", fmt.Sprintf(body, 6, 6))).FirstErr())
		require.NoError(t, transactional.EndTransaction(ctx, end))
	}

	var evidence checker.Evidence
	require.NoError(t, checker.ReadTopic(ctx, []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}, topic, &evidence))

	for i := range evidence.Records {
		if evidence.Records[i].Unreadable != "" {
			evidence.Records[i].Unreadable = "yes"
		}
	}
	assert.ElementsMatch(t, []checker.Record{
		{Partition: 0, Offset: 0, MessageID: "m1", Key: "a", OrderID: 1, Version: 1, Amount: 5},
		{Partition: 0, Offset: 1, MessageID: "m1", Key: "a", OrderID: 1, Version: 1, Amount: 5},
		{Partition: 0, Offset: 2, MessageID: "m6", Key: "a", OrderID: 6, Version: 6, Amount: 5},
		{Partition: 1, Offset: 0, MessageID: "m2", Key: "a", Unreadable: "yes"},
		{Partition: 1, Offset: 1, MessageID: "", Key: "a", Unreadable: "yes"},
		{Partition: 1, Offset: 2, MessageID: "m4", Key: "a", Unreadable: "yes"},
		{Partition: 1, Offset: 3, MessageID: "m5", Key: "b", Unreadable: "yes"},
	}, evidence.Records)
}

// A topic that is not there is an error, not an empty one.
func TestReadTopicThatIsNotThere(t *testing.T) {
	t.Parallel()
	options := []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}
	require.ErrorContains(t, checker.ReadTopic(t.Context(), options, kafkatest.UnusedTopic(t), &checker.Evidence{}), "UNKNOWN_TOPIC")
}
