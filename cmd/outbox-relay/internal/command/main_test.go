package command_test

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/command"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// asProgram makes the test binary be the program, for tests that need real processes.
const asProgram = "EFFECTONCE_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		os.Exit(command.Program())
	}
	pgtest.SideBySide()
	pgtest.Main(m)
}

// output collects what a command writes, also while it works.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func newOutput() *output { return &output{} }

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// await returns when a text was written.
func (o *output) await(t *testing.T, text string) {
	t.Helper()
	testwait.For(t, "it is written: "+text, func() (string, bool) {
		said := o.String()
		return said, strings.Contains(said, text)
	})
}

// result is what a command left.
type result struct {
	code           int
	stdout, stderr string
}

// alone keeps relays of tests that run beside each other from sharing the standard address, and from
// waiting for a database that is not there. A test that sets one of the two variables, perhaps to
// the empty text, which is the standard, leaves the other one as it is here.
func alone(environment map[string]string) map[string]string {
	off := map[string]string{"OUTBOX_LISTEN": "off", "OUTBOX_DATABASE_WAIT": "0s"}
	maps.Copy(off, environment)
	return off
}

// commandMax is far above what a command takes that ends by itself.
const commandMax = 3 * time.Minute

// run runs a command line in this process.
func run(t *testing.T, environment map[string]string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), commandMax)
	defer cancel()
	stdout, stderr := newOutput(), newOutput()
	code := command.Execute(ctx, args, alone(environment), stdout, stderr)
	return result{code, stdout.String(), stderr.String()}
}

// runOn runs a command line on a database.
func runOn(t *testing.T, databaseURL string, args ...string) result {
	t.Helper()
	return run(t, map[string]string{"OUTBOX_DATABASE_URL": databaseURL}, args...)
}

// object reads the one JSON object that a command printed.
func (r result) object(t *testing.T) map[string]any {
	t.Helper()
	var v map[string]any
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &v), "%+v", r)
	require.Equal(t, 1, strings.Count(r.stdout, "\n"), "want one line: %s", r.stdout)
	return v
}

// inBackground starts a command in this process. What it returns stops the command and waits for
// it.
func inBackground(t *testing.T, environment map[string]string, args ...string) (stderr *output, end func() int) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	stderr = newOutput()
	done := make(chan int, 1)
	go func() { done <- command.Execute(ctx, args, alone(environment), newOutput(), stderr) }()
	end = sync.OnceValue(func() int {
		cancel()
		return testwait.Chan(t, "the command's end", done)
	})
	t.Cleanup(func() { end() })
	return stderr, end
}

// process prepares the program as a process of its own.
func process(t *testing.T, environment map[string]string, args ...string) (*exec.Cmd, *output) {
	t.Helper()
	program, err := os.Executable()
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), commandMax)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = []string{asProgram + "=1"}
	for name, value := range alone(environment) {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	written := newOutput()
	cmd.Stdout, cmd.Stderr = written, written
	return cmd, written
}

var (
	connect = pgtest.Connect
	execSQL = pgtest.Exec
)
