//go:build unix

package command_test

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/longtest"
)

// The command shows the promise, and where it does not hold the checker sees it: without the claim,
// duplicates have effects.
func TestDemo(t *testing.T) {
	longtest.Only(t, "the demo, twice")
	t.Parallel()
	for name, broken := range map[string]bool{"holds": false, "breaks without dedup": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd, _ := process(t, map[string]string{"DATABASE_URL": "", "KAFKA_BROKERS": ""}, "demo", "--orders", "800", "--duration", "6s", "--json", "--seed", "11", fmt.Sprint("--without-dedup=", broken))
			cmd.Env = append(os.Environ(), cmd.Env...)
			stdout, stderr := newOutput(), newOutput()
			cmd.Stdout, cmd.Stderr = stdout, stderr
			err := cmd.Run()
			require.Equal(t, broken, err != nil, "%v: %s\n%s", err, stderr, stdout)
			lines := strings.Split(strings.TrimSpace(stdout.String()), "\n")
			var result map[string]any
			require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &result), stdout)
			for _, name := range []string{"lost", "undelivered", "crashes"} {
				assert.Zero(t, result[name], name)
			}
			for _, name := range []string{"doubled", "wrong_balances"} {
				assert.Equal(t, broken, result[name] != 0.0, name)
			}
			for _, name := range []string{"duplicates_delivered", "kills", "freezes", "seconds"} {
				assert.Greater(t, result[name], 0.0, name)
			}
		})
	}
}
