//go:build unix

package main_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/longtest"
)

// demoMax is far above what a short demo takes on a busy machine.
const demoMax = 3 * time.Minute

// demoCommand returns the command as a user starts it, on the embedded servers.
func demoCommand(t *testing.T, program string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), demoMax)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, program, append([]string{"demo"}, args...)...)
	cmd.WaitDelay = 30 * time.Second
	for _, variable := range os.Environ() {
		name, _, _ := strings.Cut(variable, "=")
		if name != "DATABASE_URL" && name != "KAFKA_BROKERS" && !strings.HasPrefix(name, "OUTBOX_") {
			cmd.Env = append(cmd.Env, variable)
		}
	}
	return cmd
}

// The command shows the promise, shows that the checker can see it broken, and leaves no process
// behind however it ends.
func TestDemo(t *testing.T) {
	longtest.Only(t, "the demo, several times")
	t.Parallel()
	program := filepath.Join(t.TempDir(), "outbox-relay")
	output, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".").CombinedOutput()
	require.NoError(t, err, string(output))
	t.Run("holds", func(t *testing.T) {
		t.Parallel()
		var stdout, stderr bytes.Buffer
		cmd := demoCommand(t, program, "--orders", "800", "--duration", "6s", "--json", "--seed", "11")
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		require.NoError(t, cmd.Run(), "%s\n%s", &stderr, &stdout)
		result := lastLine(t, stdout.String())
		for name, want := range map[string]float64{
			"orders": 800, "delivered": 800, "effects": 800, "lost": 0, "doubled": 0, "out_of_order": 0,
			"undelivered": 0, "phantoms": 0, "wrong_balances": 0, "crashes": 0, "seed": 11,
		} {
			assert.InDelta(t, want, result[name], 0, name)
		}
		for _, name := range []string{"duplicates_delivered", "kills", "freezes", "seconds"} {
			assert.Greater(t, result[name], 0.0, name)
		}
		assert.Contains(t, result["postgres"], "embedded")
		assert.Contains(t, result["kafka"], "kfake")
		assert.Contains(t, stderr.String(), "orders 800/800")
	})
	t.Run("breaks without dedup", func(t *testing.T) {
		t.Parallel()
		var stdout bytes.Buffer
		cmd := demoCommand(t, program, "--orders", "800", "--duration", "6s", "--without-dedup")
		cmd.Stdout = &stdout
		var exit *exec.ExitError
		require.ErrorAs(t, cmd.Run(), &exit, &stdout)
		assert.Equal(t, 1, exit.ExitCode())
		assert.Regexp(t, `doubled \(effects beyond the first of an order\) +[1-9]`, stdout.String())
		lines := strings.Split(strings.TrimSpace(stdout.String()), "\n")
		assert.Contains(t, lines[len(lines)-1], "The promise did NOT hold: 0 lost, ")
	})
	for _, end := range []os.Signal{os.Interrupt, os.Kill} {
		t.Run("leaves nothing behind after "+end.String(), func(t *testing.T) {
			t.Parallel()
			endsWithItsChildren(t, demoCommand(t, program), end)
		})
	}
}

func lastLine(t *testing.T, stdout string) map[string]any {
	t.Helper()
	lines := strings.Split(strings.TrimSpace(stdout), "\n")
	var result map[string]any
	require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &result), stdout)
	return result
}

// endsWithItsChildren ends the demo while a process of it is frozen, and waits for the end of all
// processes below it, PostgreSQL's too.
func endsWithItsChildren(t *testing.T, cmd *exec.Cmd, end os.Signal) {
	t.Helper()
	if _, err := os.Stat("/proc/self/task"); err != nil {
		require.NotEqual(t, "linux", runtime.GOOS, "/proc is there on every Linux: %v", err)
		t.Skip("LOUD SKIP: no /proc on this system, so the children of a process cannot be found")
	}
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	text := bufio.NewScanner(stdout)
	for text.Scan() && !strings.Contains(text.Text(), "(now ") { // frozen now
	}
	below := descendants(cmd.Process.Pid)
	assert.Greater(t, len(below), 6, "a shop, two relays, three consumers, PostgreSQL")
	for _, pid := range below {
		// What is killed cannot remove its logs.
		if logs, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/2", pid)); strings.Contains(logs, "effectonce-demo-") {
			t.Cleanup(func() { assert.NoError(t, os.RemoveAll(filepath.Dir(logs))) })
		}
	}
	require.NoError(t, cmd.Process.Signal(end))
	_, err = io.Copy(io.Discard, stdout)
	require.NoError(t, err)
	require.Error(t, cmd.Wait())
	assert.Eventually(t, func() bool {
		for _, pid := range below {
			if syscall.Kill(pid, 0) == nil {
				return false
			}
		}
		return true
	}, commandMax, 50*time.Millisecond, "%v still run", below)
}

// descendants lists the processes below one.
func descendants(pid int) (all []int) {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid)) // a process that ends has none
	for _, task := range tasks {
		text, _ := os.ReadFile(task)
		for _, field := range strings.Fields(string(text)) {
			child, _ := strconv.Atoi(field)
			all = append(append(all, child), descendants(child)...)
		}
	}
	return all
}
