// Package pgtest gives each test a PostgreSQL database of its own, and checks it when the test
// ends.
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
//
//	func TestPublish(t *testing.T) {
//		t.Parallel()
//		pool := pgtest.Pool(t) // migrated, dropped when the test ends
//		...
//	}
//
// One server serves all tests of a process; package servers describes which. Snapshots are
// cluster-wide: a transaction that one test holds open delays what every other test sees as
// finished. A test that does so, or that kills the server, uses a Cluster of its own.
//
// The servers' clock may be hours ahead of the tests' clock, or behind it. A test that passes without
// that has to pass with it, because only the database's clock is used for decisions:
//
//	.ci/clock -1 go test ./dedup/idempotency/...
package pgtest
