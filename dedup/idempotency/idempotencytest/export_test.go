package idempotencytest

import (
	"testing"

	"github.com/effectonce/effectonce/internal/effects"
)

// Doubt returns what Verify would report of a run whose outcome is in doubt.
func Doubt(clean, other effects.Effects) string {
	return result{after: other, inDoubt: true}.compare(result{after: clean})
}

// Problems returns what Verify would report.
func Problems(t *testing.T, start Start, o Options) []string {
	t.Helper()
	problems, err := verify(t, start, o)
	if err != nil {
		problems = append(problems, err.Error())
	}
	return problems
}
