// Package longtest keeps tests out of the fast tier, "go test ./...": those that need real time,
// chance, much data, builds of other programs or many processes.
package longtest

import (
	"os"
	"strconv"
	"testing"
)

// Variable is the environment variable that runs the long tests, too: EFFECTONCE_LONG=1.
const Variable = "EFFECTONCE_LONG"

// Only skips the test unless EFFECTONCE_LONG is true. why says what keeps it out of the fast tier.
func Only(tb testing.TB, why string) {
	tb.Helper()
	value := os.Getenv(Variable)
	if value == "" {
		value = "0"
	}
	switch chosen, err := strconv.ParseBool(value); {
	case err != nil:
		tb.Fatalf("%s=%q: want 1 or 0", Variable, value)
	case !chosen:
		tb.Skipf("LONG TEST, skipped (%s): %s=1 runs it", why, Variable)
	}
}
