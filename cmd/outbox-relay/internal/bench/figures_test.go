package bench_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/bench"
)

// Property: the tags of reports name figures that the report has. A ratio of others would be left
// out of every report.
func TestRatiosNameFigures(t *testing.T) {
	t.Parallel()
	assert.Empty(t, bench.UnknownKeys(&bench.ConsumeReport{}))
	assert.Empty(t, bench.UnknownKeys(&bench.RelayReport{}))
}
