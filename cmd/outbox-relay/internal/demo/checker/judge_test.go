package checker_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/demo/checker"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// perfect is a run of three customers with ten orders each, without any fault and with one
// duplicate.
func perfect() checker.Evidence {
	e := checker.Evidence{Balances: map[string]int64{}}
	for version := int64(1); version <= 10; version++ {
		for customer := range int64(3) {
			o := checker.Order{
				ID: version*3 + customer, MessageID: fmt.Sprintf("message-%d", version*3+customer),
				Key: fmt.Sprintf("customer-%d", customer), Version: version, Amount: 10*version + customer,
			}
			e.Orders = append(e.Orders, o)
			e.Records = append(e.Records, checker.Record{Partition: int32(customer), Offset: version, Order: o})
			e.Effects = append(e.Effects, checker.Effect{Sequence: int64(len(e.Effects)), Order: o})
			e.Balances[o.Key] += o.Amount
		}
	}
	duplicate := e.Records[0]
	duplicate.Offset = 11
	e.Records = append(e.Records, duplicate)
	return e
}

// A run without faults is found to be one, whatever the order of the evidence and of the
// duplicates.
func TestJudgeFindsNothingInAPerfectRun(t *testing.T) {
	t.Parallel()
	e := perfect()
	slices.Reverse(e.Orders)
	slices.Reverse(e.Records)
	slices.Reverse(e.Effects)
	verdict := checker.Judge(e)
	assert.Equal(t, checker.Verdict{Orders: 30, Delivered: 30, Records: 31, DuplicatesDelivered: 1, Effects: 30}, verdict)
	assert.True(t, verdict.Held())
}

// Every kind of damage is found and counted, and nothing else is: a checker that cannot fail proves
// nothing.
func TestJudgeFindsEveryPlantedBug(t *testing.T) {
	t.Parallel()
	cases := []struct {
		bug   string
		plant func(e *checker.Evidence)
		want  func(v *checker.Verdict) // what differs from the verdict on a perfect run
	}{
		{"effect dropped", func(e *checker.Evidence) {
			e.Effects = slices.Delete(e.Effects, 4, 5)
		}, func(v *checker.Verdict) { v.Effects, v.Lost = 29, 1 }},
		{"effect doubled", func(e *checker.Evidence) {
			e.Effects = append(e.Effects, resequenced(e.Effects[7], 100))
		}, func(v *checker.Verdict) { v.Effects, v.Doubled = 31, 1 }},
		{"effect without an order", func(e *checker.Evidence) {
			e.Effects = append(e.Effects, checker.Effect{Sequence: 100, Order: checker.Order{ID: 999, MessageID: "x", Key: "customer-1", Version: 11}})
		}, func(v *checker.Verdict) { v.Effects, v.Phantoms = 31, 1 }},
		{"effect of another amount", func(e *checker.Evidence) { e.Effects[3].Amount++ }, func(v *checker.Verdict) { v.Phantoms = 1 }},
		{"effect of another message", func(e *checker.Evidence) { e.Effects[3].MessageID = "x" }, func(v *checker.Verdict) { v.Phantoms = 1 }},
		{"versions of two effects swapped", func(e *checker.Evidence) {
			e.Effects[0].Version, e.Effects[3].Version = e.Effects[3].Version, e.Effects[0].Version
		}, func(v *checker.Verdict) { v.OutOfOrder, v.Phantoms = 1, 2 }},
		{"update lost beside its effect", func(e *checker.Evidence) { e.Balances["customer-1"] -= 5 }, func(v *checker.Verdict) { v.WrongBalances = 1 }},
		{"balance of nobody", func(e *checker.Evidence) { e.Balances["customer-9"] = 5 }, func(v *checker.Verdict) { v.WrongBalances = 1 }},
		{"order never delivered", func(e *checker.Evidence) {
			e.Records = slices.Delete(e.Records, 8, 9)
		}, func(v *checker.Verdict) { v.Records, v.Delivered, v.Undelivered = 30, 29, 1 }},
		{"records in the wrong order", func(e *checker.Evidence) {
			e.Records[0].Offset, e.Records[3].Offset = e.Records[3].Offset, e.Records[0].Offset
		}, func(v *checker.Verdict) { v.OutOfOrder = 1 }},
		{"key in two partitions", func(e *checker.Evidence) { e.Records[3].Partition = 2 }, func(v *checker.Verdict) { v.OutOfOrder = 1 }},
		{"record without an order", func(e *checker.Evidence) {
			e.Records = append(e.Records, checker.Record{Offset: 50, Order: checker.Order{ID: 999, MessageID: "x", Key: "customer-0", Version: 11}})
		}, func(v *checker.Verdict) { v.Records, v.Phantoms = 32, 1 }},
		{"record that is no event", func(e *checker.Evidence) {
			e.Records = append(e.Records, checker.Record{Offset: 50, Unreadable: "no JSON"})
		}, func(v *checker.Verdict) { v.Records, v.Phantoms = 32, 1 }},
		{"duplicates", func(e *checker.Evidence) {
			for n := range int64(2) {
				again := e.Records[20]
				again.Offset = 50 + n
				e.Records = append(e.Records, again)
			}
		}, func(v *checker.Verdict) { v.Records, v.DuplicatesDelivered = 33, 3 }},
	}
	for _, c := range cases {
		t.Run(c.bug, func(t *testing.T) {
			t.Parallel()
			e := perfect()
			c.plant(&e)
			want := checker.Judge(perfect())
			c.want(&want)
			got := checker.Judge(e)
			examples := got.Examples
			got.Examples = nil
			assert.Equal(t, want, got)
			assert.Equal(t, c.bug == "duplicates", got.Held())
			assert.Equal(t, got.Held(), len(examples) == 0, "every difference is put into words")
		})
	}
}

func resequenced(e checker.Effect, sequence int64) checker.Effect {
	e.Sequence = sequence
	return e
}

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

func TestMain(m *testing.M) { pgtest.Main(m) }
