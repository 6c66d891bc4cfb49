package torture_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
)

// Property: a bulk plan has the faults of the plan that was drawn, which stays as it is, and no
// handler that is slow by itself.
func TestBulkKeepsFaults(t *testing.T) {
	t.Parallel()
	for seed := range uint64(50) {
		draw := func() torture.Plan { return torture.Draw(seed, 1, 60, 1000, 2, torture.Abilities{}) }
		p := draw()
		bulk := p.Bulk(40_000)
		require.Equal(t, draw(), p)
		assert.Equal(t, p.Faults, bulk.Faults)
		assert.Equal(t, 40_000, bulk.Scene.Rate)
		assert.Len(t, bulk.Scene.Groups, len(p.Scene.Groups))
		for i, g := range bulk.Scene.Groups {
			assert.Equal(t, scene.ShapeBatch, g.Shape)
			assert.False(t, g.Calls || g.Journal || g.Fences, "the batch handler does none of these")
			assert.Equal(t, p.Scene.Groups[i].Dedup, g.Dedup)
		}
	}
}

// Property: what all systems play promises nothing of its own that none of them keeps: with relays
// that are at-least-once, every group recognises a second record.
func TestRivalsPlansRecogniseCopies(t *testing.T) {
	t.Parallel()
	positions := 0
	for seed := range uint64(200) {
		p := torture.Draw(seed, 1, 60, 1000, 2, torture.Abilities{})
		for _, g := range p.Scene.Groups {
			if g.Dedup == "position" {
				positions++
			}
		}
		common := p.For("")
		assert.False(t, common.Scene.Relay.ExactlyOnce)
		for _, g := range common.Scene.Groups {
			assert.NotEqual(t, "position", g.Dedup)
		}
	}
	assert.Positive(t, positions, "the test's own premise")
}
