package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Property: exactly one region executes the request of a key; the other one names it.
func TestOneRegionExecutesEachKey(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), &out))
	for lines := strings.Split(strings.TrimSpace(out.String()), "\n"); len(lines) > 0; lines = lines[2:] {
		eu, us := lines[0], lines[1]
		require.NotEqual(t, strings.Contains(eu, ": 201"), strings.Contains(us, ": 201"), out.String())
		require.NotEqual(t, strings.HasSuffix(eu, ": 421 us"), strings.HasSuffix(us, ": 421 eu"), out.String())
	}
}
