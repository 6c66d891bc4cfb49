// Package judge decides whether a round of a torture run kept the promise. It shares no code with
// the engine: it reads the ledgers that were written outside of the system, the tables with plain
// SQL and the topics with a plain client, and compares them.
package judge
