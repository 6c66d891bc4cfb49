package main

import "runtime/debug"

// gcPercent is the allowed garbage in percent of the live heap. A relay holds some tens of MB and
// produces a kilobyte of garbage for each row. With Go's 100 it spends a good part of its CPU time
// on collecting; with 300 it takes twice the memory and saves no time that could be measured.
// Measured by outbox-relay bench relay.
const gcPercent = 150

const gcPercentOfGo = 100

// relaxCollector lets the garbage collector run less often, unless GOGC is set.
func relaxCollector() {
	if before := debug.SetGCPercent(gcPercent); before != gcPercentOfGo {
		debug.SetGCPercent(before)
	}
}
