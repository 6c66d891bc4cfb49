// Package pgtest gives each test a PostgreSQL database of its own, and looks over it when the test ends.
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
//
//	func TestPublish(t *testing.T) {
//		t.Parallel()
//		pool := pgtest.Pool(t) // migrated, dropped when the test ends
//		...
//	}
//
// One server serves all tests of a process; package servers says which. Snapshots are cluster-wide: a
// transaction that one test holds open holds back what every other test sees as finished. A test that
// does so, or that kills the server, asks for a Cluster of its own.
//
// With TEST_CLOCK_OFFSET=1h, or -1h, the servers' clock is so far ahead of that of the tests; what passes without it has
// to pass with it, since only the database's clock decides:
//
//	TEST_CLOCK_OFFSET=-1h go test -short ./dedup/idempotency/...
//
// Such a server runs from downloaded binaries, also where there are a DATABASE_URL and a Docker engine; a C
// compiler makes the library that shifts its clock.
package pgtest
