// Package torture runs the pipeline with random configurations under random faults, and lets an
// independent judge decide whether the promise was kept.
//
// A run is a sequence of rounds. Each round draws from the seed a configuration of producers, relays,
// consumer groups and HTTP services (package scene), and a schedule of faults (Plan). Its processes
// (package worker) are children of this one. The nemesis kills, freezes and restarts them, ends
// sessions, crashes servers, disturbs connections, publishes records again, and does what operators
// do. Then everything is healed, what was sick is cured, and everything has to drain. What happened
// outside of the system is in ledgers (package ledger); package judge compares them with tables and
// topics. The seed reproduces configuration and schedule, not how the processes interleave.
package torture
