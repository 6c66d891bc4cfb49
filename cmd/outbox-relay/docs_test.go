package main_test

import (
	"flag"
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	main "github.com/effectonce/effectonce/cmd/outbox-relay"
)

var update = flag.Bool("update", false, "write docs/cli.md anew")

// docs/cli.md is generated from the commands, without values of a user or a machine.
func TestCommandLineIsDocumented(t *testing.T) {
	t.Parallel()
	const path = "../../docs/cli.md"
	want := main.CommandLine()
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(want), 0o600))
	}
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, want, string(text), "docs/cli.md is not what the commands say: go test ./cmd/outbox-relay -run TestCommandLineIsDocumented -update")
	for _, name := range []string{"explain", "verify", "tail", "positions", "parked retry"} {
		assert.Contains(t, want, "\n| `"+name+"` | ")
	}
}
