// Package collector sets the garbage collector of programs that hold little and make much garbage.
package collector

import "runtime/debug"

// percent is how much garbage there may be for what is held. A relay holds some tens of MB and makes a kilobyte of garbage for
// each row: with Go's 100 a good part of its CPU time goes into collecting it, and with 300 it takes twice the memory for no time that
// could be measured. Measured by outbox-relay bench relay.
const percent = 150

const standard = 100 // of Go

// Relax lets the collector run less often, unless GOGC says how often.
func Relax() {
	if before := debug.SetGCPercent(percent); before != standard {
		debug.SetGCPercent(before)
	}
}
