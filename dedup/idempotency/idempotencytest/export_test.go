package idempotencytest

import "testing"

// Problems returns what Verify would report.
func Problems(t *testing.T, start Start, o Options) []string {
	t.Helper()
	problems, err := verify(t, start, o)
	if err != nil {
		problems = append(problems, err.Error())
	}
	return problems
}
