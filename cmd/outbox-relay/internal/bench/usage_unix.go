//go:build unix

package bench

import (
	"syscall"
	"time"
)

// cpuSeconds is what this process has used so far, in user mode and in the kernel.
func cpuSeconds() *float64 {
	var used syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &used) != nil {
		return nil
	}
	seconds := time.Duration(used.Utime.Nano() + used.Stime.Nano()).Seconds()
	return &seconds
}
