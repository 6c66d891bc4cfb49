package main_test

import (
	"os/exec"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Property: a program that is built with -tags lean links nothing that is only for trying out.
// (The test of the image builds it.)
func TestLeanProgramLinksNoServers(t *testing.T) {
	t.Parallel()
	list, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-tags", "lean", ".").CombinedOutput()
	require.NoError(t, err, string(list))
	for _, module := range []string{"testcontainers", "kfake", "embedded-postgres", "docker/docker", "internal/servers"} {
		assert.NotContains(t, string(list), module)
	}
}
