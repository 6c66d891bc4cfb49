package relay_test

import (
	"testing"

	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) {
	pgtest.SideBySide()
	pgtest.Main(m)
}

// both runs a test at least once and exactly once.
func both(t *testing.T, test func(t *testing.T, exactly bool)) {
	t.Helper()
	either(t, "at least once", "exactly once", test)
}

// either runs a test for both answers to a question, each under its name.
func either(t *testing.T, no, yes string, test func(t *testing.T, answer bool)) {
	t.Helper()
	for name, answer := range map[string]bool{no: false, yes: true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, answer)
		})
	}
}
