package consumertest

import (
	"testing"

	"github.com/effectonce/effectonce/consumer"
)

// Problems returns what Verify would report.
func Problems(t *testing.T, handler consumer.Handler, messages []Message, o Options) []string {
	t.Helper()
	problems, err := verify(t, handler, Records(messages...), o)
	if err != nil {
		problems = append(problems, err.Error())
	}
	return problems
}
