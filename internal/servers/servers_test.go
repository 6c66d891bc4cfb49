package servers_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/servers"
)

// A free port may be taken when the server needs it: the next one is tried, but not forever.
func TestNextPortAfterACollision(t *testing.T) {
	t.Parallel()
	tried, err := servers.LaunchBeside(t.Context(), 2)
	require.NoError(t, err)
	assert.Equal(t, 3, tried)
	tried, err = servers.LaunchBeside(t.Context(), 99)
	require.ErrorContains(t, err, "Address already in use")
	assert.Equal(t, 5, tried)
}
