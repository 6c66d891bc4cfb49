package integration_test

import (
	"context"
	"flag"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/integration/torture"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/nodedup"
)

var (
	tortureFor  = flag.Duration("torture", 3*time.Minute, "how long TestTorture has faults")
	tortureSeed = flag.Uint64("torture-seed", 0, "seed of TestTorture; 0 takes one by chance")
	tortureCuts = flag.Int("torture-shrink", 0, "how often TestTorture tries each cut of a run that failed; 0: it is not shrunk")
	tortureLog  = flag.String("torture-log", "", "file of its log, which is in a directory else")
)

// Under random faults, with handlers as people write them, every acknowledged order takes effect exactly
// once, in order, and everything drains: see package torture.
func TestTorture(t *testing.T) {
	longtest.Only(t, "torture")
	t.Parallel()
	opts := torture.Options{Seed: *tortureSeed, Duration: *tortureFor, Shrink: *tortureCuts, Progress: func(line string) { t.Log(line) }}
	if opts.Seed == 0 {
		opts.Seed = uint64(rand.Uint32())
	}
	name := *tortureLog
	if name == "" {
		name = filepath.Join(t.ArtifactDir(), "torture.log")
	}
	log, err := os.Create(name)
	require.NoError(t, err)
	defer func() { _ = log.Close() }()
	opts.Log = log
	report, err := torture.Run(context.WithoutCancel(t.Context()), opts)
	require.NoError(t, err)
	t.Logf("%+v", *report)
	assert.Empty(t, report.Problems, "-torture-seed %d", opts.Seed)
}

// The judge finds what consumers double that do not claim, which needs no fault.
func TestTortureFindsDoubledEffects(t *testing.T) {
	longtest.Only(t, "torture")
	t.Parallel()
	report, err := torture.Run(nodedup.With(t.Context()), torture.Options{Seed: 7, Duration: 5 * time.Second, Embedded: true, Shrink: 1})
	require.NoError(t, err)
	assert.Positive(t, report.Doubled)
	assert.Contains(t, report.String(), "it needs: no fault and no habit")
}
