package integration_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
)

// processState returns the state letter of a process on Linux: T is stopped by a signal.
func processState(pid int) (byte, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	end := bytes.LastIndexByte(stat, ')') // the name may contain anything
	if end < 0 || end+2 >= len(stat) {
		return 0, errors.New("unexpected /proc/PID/stat")
	}
	return stat[end+2], nil
}
