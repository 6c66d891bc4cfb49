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
package pgtest
