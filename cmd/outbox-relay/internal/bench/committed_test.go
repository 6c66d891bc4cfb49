package bench_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/bench"
)

// Property: the committed plots are those of the committed results.
func TestCommittedPlots(t *testing.T) {
	t.Parallel()
	dir := filepath.Join("..", "..", "..", "..", "docs", "benchmarks")
	results, err := bench.LoadResults(filepath.Join(dir, "results.json"))
	require.NoError(t, err)
	for _, p := range results.Plots {
		found, err := os.ReadFile(filepath.Join(dir, p.Name+".svg"))
		require.NoError(t, err)
		assert.Equal(t, string(bench.SVG(p.Title, 1, p)), string(found), "outbox-relay bench figures --from docs/benchmarks/results.json --svg docs/benchmarks")
	}
}
