// Package consumertest tests handlers of package consumer against a real PostgreSQL, without Kafka.
//
//	func TestMain(m *testing.M) { consumertest.Main(m) }
//
//	func TestInvoices(t *testing.T) {
//		consumertest.Verify(t, handler, []consumertest.Message{
//			{Key: "order-1", Value: `{"order": 1, "amount": 5}`},
//			{Key: "order-2", Value: `{"order": 2, "amount": 7}`},
//		}, consumertest.Options{Setup: `CREATE TABLE invoice (order_id int, amount int)`})
//	}
//
// Verify delivers the messages to the handler twice, in other batches, and with the consumer killed at each
// point between two durable steps, and compares the tables with those after a single clean run. What
// differs is said with what the handler must have done to cause it.
//
// PostgreSQL is the one that DATABASE_URL names, else a container where a Docker engine answers, else an
// embedded one, which is downloaded once. Each run has a database of its own, which is dropped after it.
//
// Effects outside of the database are seen through Options.Calls: calls of other systems need a key that stays the same
// at every attempt, after parking and retry too, msg.ChildID("step").
package consumertest
