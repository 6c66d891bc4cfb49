// Package idempotencytest tests work under idempotency keys against a real PostgreSQL.
//
//	func TestMain(m *testing.M) { idempotencytest.Main(m) }
//
//	func TestOrders(t *testing.T) {
//		key := idempotency.Key{Scope: "tenant", Value: "k"}
//		idempotencytest.Verify(t, idempotencytest.Once(idempotency.Config{Operation: "order"}, key, createOrder),
//			idempotencytest.Options{Setup: `CREATE TABLE orders (id uuid, amount int)`})
//	}
//
// Verify sends one request twice in a row, ten times at once, with a COMMIT that fails, a connection that is cut, a client
// that goes away, and a replica that is killed at each point between two durable steps, after which another one is
// asked. It compares the tables, and what Options.Effects counts elsewhere, with those after a single execution. What
// differs is said with what the work must have done to cause it.
//
// Once, Flow and Handler are the shapes of what is verified; a function of your own is another one.
//
// Effects outside of the database are only seen through Options.Effects: let a stub of the foreign system count what it
// did, by the key that it was given. A phase that is AtMostOnce may end in doubt: then Verify only asks that nothing
// happened twice. Work that refuses (status 400 and above) may have no effect; then Verify asks that ten copies at once run it
// once.
//
// PostgreSQL is the one that DATABASE_URL names, else a container where a Docker engine answers, else an embedded one,
// which is downloaded once. Each run has a database of its own, with the schema "effectonce", which is dropped after it.
package idempotencytest
