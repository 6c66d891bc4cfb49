package integration_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var (
	tortureFor  = flag.Duration("torture", 0, "how long TestTorture runs, in whole minutes; 0: one short round")
	tortureSeed = flag.String("torture.seed", "", "the seed of TestTorture; default: a new one")
	tortureDir  = flag.String("torture.logs", "", "directory for the logs of rounds that fail; default: they are gone with the test")
)

// Property: whatever is drawn as configuration and faults, every message that is confirmed to its
// writer has its effect once and in order, and everything drains. -torture=20m makes it longer.
//
//nolint:paralleltest // it takes the whole machine
func TestTorture(t *testing.T) {
	seed := *tortureSeed
	if seed == "" {
		seed = strconv.Itoa(int(rand.Uint32()))
	}
	logs := *tortureDir
	if logs == "" {
		logs = t.TempDir()
	}
	program := filepath.Join(t.TempDir(), "outbox-relay")
	output, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, "../cmd/outbox-relay").CombinedOutput()
	require.NoError(t, err, string(output))
	arguments := []string{"torture", "--json", "--seed", seed, "--logs", logs, "--broker-count", "3"}
	if *tortureFor == 0 {
		// One round: none begins after it, because it takes longer than no time.
		arguments = append(arguments, "--embedded", "--minutes", "0", "--round-seconds", "8", "--faults-per-minute", "60")
	} else {
		arguments = append(arguments, "--minutes", strconv.Itoa(int(*tortureFor/time.Minute)))
	}
	t.Logf("outbox-relay %s", strings.Join(arguments, " "))
	cmd := exec.CommandContext(t.Context(), program, arguments...)
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	err = cmd.Run()
	if err != nil {
		t.Logf("%s", log.String())
		showLogs(t, logs)
	}
	require.NoError(t, err, out.String())
	var report struct {
		Messages, Effects, Faults, Rounds, Lost, Doubled int
		OutOfOrder                                       int `json:"out_of_order"`
	}
	require.NoError(t, json.Unmarshal(out.Bytes(), &report), out.String())
	t.Logf("%+v", report)
	assert.Positive(t, report.Messages)
	assert.Positive(t, report.Effects)
	assert.Positive(t, report.Faults)
	assert.Zero(t, report.Lost+report.Doubled+report.OutOfOrder)
}

// showLogs prints the ends of the files that a failed round left.
func showLogs(t *testing.T, dir string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "round-*", "*.log"))
	require.NoError(t, err)
	for _, name := range files {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		t.Logf("%s:\n%s", filepath.Base(name), text[max(0, len(text)-2000):])
	}
}
