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
// Verify delivers the messages to the handler twice, in other batches, and with the consumer killed
// at each point between two durable steps. It compares the tables with those after a single clean
// run. It reports each difference with its likely cause in the handler.
//
// PostgreSQL is the server that DATABASE_URL names, otherwise a container if a Docker engine
// answers, otherwise an embedded one, which is downloaded once. Each run has its own database,
// which is dropped afterwards.
//
// Options.Calls checks effects outside of the database: calls to other systems need a key that
// stays the same in every attempt, also after parking and retry, such as msg.CallKey("step").
package consumertest
