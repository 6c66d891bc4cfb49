// Package integration holds the tests that need whole processes: they kill, freeze and cut off
// relays and consumers on real PostgreSQL and Kafka, and compare what is left with what should be.
//
// A process under test is this package's own test binary, started again with a role in its
// environment (process_test.go). What is compared is read with plain SQL and a plain Kafka client
// (check_test.go).
package integration
