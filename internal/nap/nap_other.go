//go:build !linux

package nap

import "time"

type clock struct{}

func newClock() clock { return clock{} }

func (clock) sleep(time.Duration) bool { return false }

func (clock) close() {}
