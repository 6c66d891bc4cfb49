package pgtest

import (
	"fmt"
	"os"
	"time"
)

const clockOffsetMax = 30 * 24 * time.Hour

// ClockOffset returns TEST_CLOCK_OFFSET: how far the clock of the tests' servers is ahead of the
// tests' own.
func ClockOffset() (time.Duration, error) {
	text := os.Getenv("TEST_CLOCK_OFFSET")
	if text == "" {
		return 0, nil
	}
	offset, err := time.ParseDuration(text)
	if err != nil || offset.Abs() > clockOffsetMax {
		return 0, fmt.Errorf("TEST_CLOCK_OFFSET is %q: want a duration like 1h or -1h, at most %v", text, clockOffsetMax)
	}
	return offset, nil
}
