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
// Verify sends one request three times in a row, ten times concurrently, and to a replica that is killed at each
// point between two durable steps, after which another replica gets the retry. It compares the tables,
// and what Options.Effects counts elsewhere, with those after a single execution. Each reported
// difference comes with the likely mistake in the work.
//
// Once, Flow and Handler start what is verified; you can also write a Start function of your own.
//
// Effects outside of the database are only seen through Options.Effects: let a stub of the foreign
// system count its effects, by the key that it was given. An AtMostOnce phase may become
// indeterminate: then Verify only checks that nothing happened twice. Work that refuses (status 400
// and above) may have no effect.
//
// PostgreSQL is the server in DATABASE_URL, else a container if a Docker engine is available, else
// an embedded server, which is downloaded once. Each run has its own database with the schema
// "effectonce", which is dropped after it.
package idempotencytest
