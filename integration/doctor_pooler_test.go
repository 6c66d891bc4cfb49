package integration_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// The doctor distinguishes a direct connection from one through a pooler, and statement mode, in
// which nothing works, from the other modes.
func TestDoctorKnowsPoolers(t *testing.T) {
	longtest.Only(t, "it builds a program")
	t.Parallel()
	address, program := pgtest.Database(t), filepath.Join(t.TempDir(), "outbox-relay")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, "../cmd/outbox-relay").CombinedOutput()
	require.NoError(t, err, string(out))
	type finding struct{ Check, Severity, Message, Remedy string }
	look := func(address string) finding {
		cmd := exec.CommandContext(t.Context(), program, "doctor", "--json")
		cmd.Env = append(os.Environ(), "OUTBOX_DATABASE_URL="+address)
		out, _ := cmd.Output() // it finds fault with other things as well
		var report struct{ Findings []finding }
		require.NoError(t, json.Unmarshal(out, &report), string(out))
		for _, f := range report.Findings {
			if f.Check == "pooler" {
				return f
			}
		}
		require.Fail(t, "no such check", string(out))
		return finding{}
	}
	direct := look(address)
	assert.Equal(t, "ok", direct.Severity)
	assert.Contains(t, direct.Message, "directly")
	for mode, want := range map[string]string{"transaction": "(transaction mode)", "session": "(session mode, or transaction mode under load)"} {
		f := look(newPooler(t, address, "pool_mode = "+mode).url(describeOnly))
		assert.Equal(t, "ok", f.Severity, "%+v", f)
		assert.Contains(t, f.Message, want)
	}
	f := look(newPooler(t, address, "pool_mode = statement").url(describeOnly))
	assert.Equal(t, "fail", f.Severity, "%+v", f)
	assert.Contains(t, f.Message, "statement mode")
	assert.Contains(t, strings.ToLower(f.Remedy), "pool_mode = transaction")
}
