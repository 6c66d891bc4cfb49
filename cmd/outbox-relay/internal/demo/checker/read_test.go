package checker_test

import (
	"testing"

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

// What is planted into the database is found there. A schema that is not there is an error, not a
// run without orders.
func TestReadDatabaseSeesPlantedBugs(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.EmptyDatabase(t))
	require.ErrorContains(t, checker.ReadDatabase(t.Context(), conn, "shop", &checker.Evidence{}), "read the orders")
	for bug, c := range map[string]struct {
		plant string
		want  checker.Verdict
	}{
		"none":             {``, checker.Verdict{}},
		"lost":             {`DELETE FROM effects WHERE order_id = 7`, checker.Verdict{Lost: 1}},
		"doubled":          {`INSERT INTO effects (order_id, message_id, customer, version, amount) SELECT order_id, message_id, customer, version, amount FROM effects WHERE order_id IN (3, 4)`, checker.Verdict{Doubled: 2}},
		"versions swapped": {`UPDATE effects SET version = 3 - version WHERE order_id IN (0, 3)`, checker.Verdict{OutOfOrder: 1, Phantoms: 2}},
		"phantom":          {`DELETE FROM orders WHERE id = 29`, checker.Verdict{Phantoms: 1, WrongBalances: 1}},
		"balance":          {`UPDATE balances SET balance = balance - 1 WHERE customer = 'customer-2'`, checker.Verdict{WrongBalances: 1}},
	} {
		pgtest.Exec(t, conn, `DROP SCHEMA IF EXISTS "the shop" CASCADE`)
		pgtest.Exec(t, conn, tables+c.plant)
		var evidence checker.Evidence
		require.NoError(t, checker.ReadDatabase(t.Context(), conn, "the shop", &evidence))
		got := checker.Judge(evidence)
		assert.Equal(t, c.want, checker.Verdict{
			Lost: got.Lost, Doubled: got.Doubled, OutOfOrder: got.OutOfOrder, Phantoms: got.Phantoms, WrongBalances: got.WrongBalances,
		}, "%s: %v", bug, got.Examples)
	}
}

// A topic that is not there is an error, not an empty one.
func TestReadTopicThatIsNotThere(t *testing.T) {
	t.Parallel()
	options := []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}
	require.ErrorContains(t, checker.ReadTopic(t.Context(), options, kafkatest.UnusedTopic(t), &checker.Evidence{}), "UNKNOWN_TOPIC")
}
