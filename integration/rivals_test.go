package integration_test

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// rivalPlan is a tiny round of Watermill: its relay is killed, and records are published again.
const rivalPlan = `{"seed": 1, "round": 1, "scene": {"rival": "watermill", "seconds": 5, "partitions": 2, "keys": 20, "rate": 50, "backlog": 500,
 "producers": {"processes": 1, "writers": 1, "batch_max": 10}, "relay": {"replicas": 1, "shards": 1, "page_rows": 100, "keep": 1000000000},
 "groups": [{"number": 1, "members": 1, "shape": "each", "order": "partition", "workers": 1, "dedup": "id", "batch_max": 10, "attempts_max": 3}]},
 "faults": [{"at": 1000000000, "kind": "kill", "choice": 1}, {"at": 2000000000, "kind": "copies", "choice": 5}]}`

// Property: a rival plays under the nemesis, its effects arrive, and the judge sees its messages. The
// verdict is the rival's own affair.
//
//nolint:paralleltest // it takes the machine
func TestRivalsPlay(t *testing.T) {
	dir := t.TempDir()
	program, rivals, plan := filepath.Join(dir, "outbox-relay"), filepath.Join(dir, "rivals"), filepath.Join(dir, "plan.json")
	output, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, "../cmd/outbox-relay").CombinedOutput()
	require.NoError(t, err, string(output))
	output, err = exec.CommandContext(t.Context(), "go", "-C", "../cmd/outbox-relay/internal/torture/rivals", "build", "-o", rivals, ".").CombinedOutput()
	if err != nil {
		t.Fatalf("THE RIVALS' PROGRAM CANNOT BE BUILT, so that no rival plays: %v: %s", err, output)
	}
	require.NoError(t, os.WriteFile(plan, []byte(rivalPlan), 0o600))
	var out, log bytes.Buffer
	cmd := exec.CommandContext(t.Context(), program, "torture", "--json", "--embedded", "--rival-program", rivals, "--plan", plan, "--logs", dir)
	cmd.Stdout, cmd.Stderr = &out, &log
	err = cmd.Run()
	var status *exec.ExitError
	if err != nil {
		require.ErrorAs(t, err, &status, log.String())
	}
	var report struct{ Rounds, Messages, Effects, Faults, Phantoms, Money int }
	require.NoError(t, json.Unmarshal(out.Bytes(), &report), "%s%s", out.String(), log.String())
	t.Logf("%+v", report)
	assert.Equal(t, 1, report.Rounds)
	assert.Positive(t, report.Messages)
	assert.Positive(t, report.Effects)
	assert.Positive(t, report.Faults)
	assert.Zero(t, report.Phantoms+report.Money)
}
