package pause_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/effectonce/effectonce/internal/pause"
)

// Property: a pause takes its time and returns true, also one of no time. The end of the context
// ends it, and it returns false, also if both end at once.
func TestPause(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		assert.True(t, pause.For(t.Context(), time.Second))
		assert.True(t, pause.For(t.Context(), -time.Second))
		assert.Equal(t, time.Second, time.Since(begun))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		assert.False(t, pause.For(ctx, time.Hour))
		assert.Equal(t, 2*time.Second, time.Since(begun))
		for range 20 {
			assert.False(t, pause.For(ctx, 0))
		}
	})
}
