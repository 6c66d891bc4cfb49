package main_test

import (
	"os/exec"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Property: a program that is built with -tags lean builds, and links nothing that is only for trying out.
func TestLeanProgramLinksNoServers(t *testing.T) {
	t.Parallel()
	list, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-tags", "lean", ".").CombinedOutput()
	require.NoError(t, err, string(list))
	for _, module := range []string{"testcontainers", "kfake", "ThreeDotsLabs/watermill", "embedded-postgres", "docker/docker", "internal/servers"} {
		assert.NotContains(t, string(list), module)
	}
	vet, err := exec.CommandContext(t.Context(), "go", "vet", "-tags", "lean", ".").CombinedOutput()
	require.NoError(t, err, string(vet))
}
