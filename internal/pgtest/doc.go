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
// With TEST_CLOCK_OFFSET=1h, or -1h, the servers' clock is that far ahead of the tests' clock. A
// test that passes without it has to pass with it, because only the database's clock is used for
// decisions:
//
//	TEST_CLOCK_OFFSET=-1h go test ./dedup/idempotency/...
//
// Such a server runs from downloaded binaries, even if there are a DATABASE_URL and a Docker
// engine. It needs a C compiler for the library that shifts its clock.
package pgtest
